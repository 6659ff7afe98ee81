#!/usr/bin/env bash
# Installs the C++ and C libraries under build/install and uses them as other projects would:
# with find_package, pkg-config and add_subdirectory. Run it in the repository's root.
set -euo pipefail

work=$PWD/build/install
rm -rf "$work"
mkdir -p "$work"
export CMAKE_GENERATOR=${CMAKE_GENERATOR:-Ninja}
# The library's sources are compiled together, which takes a third of the time, and the static
# library alone is optimised: without inlining a shared one has to export all that it is used for.
together=(-DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=0)
as_it_is=(-DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0)

# Configures, builds and, if there is one, runs `example`: build FOLDER NAME OPTIONS...
build() {
  local source=$1 name=$2
  shift 2
  cmake -S "$source" -B "$work/$name" -DCMAKE_BUILD_TYPE=Release "$@" > "$work/$name.log"
  cmake --build "$work/$name" >> "$work/$name.log" || { cat "$work/$name.log"; exit 1; }
  if [ -x "$work/$name/example" ]; then "$work/$name/example"; fi
}

for kind in static shared; do
  echo "::: an installed $kind library"
  case $kind in
    static) build . static "${together[@]}" -DBUILD_SHARED_LIBS=OFF ;;
    shared) build . shared "${together[@]}" "${as_it_is[@]}" -DBUILD_SHARED_LIBS=ON ;;
  esac
  # It may be moved after the installation.
  cmake --install "$work/$kind" --prefix "$work/unmoved" > /dev/null
  mv "$work/unmoved" "$work/prefix-$kind"
  build examples/cpp "cpp-$kind" -DCMAKE_PREFIX_PATH="$work/prefix-$kind"
  build examples/c "c-$kind" -DCMAKE_PREFIX_PATH="$work/prefix-$kind"
done

prefix=$work/prefix-static
echo "::: each public header compiles alone"
for header in "$prefix"/include/fastdraft/*.h; do
  echo "#include <fastdraft/${header##*/}>" \
    | "${CXX:-c++}" -std=c++17 -Wall -Wextra -Werror -fsyntax-only -I "$prefix/include" -x c++ -
done
for header in c.h version.h; do
  printf '#include <fastdraft/%s>\nint main(void) { return 0; }\n' "$header" \
    | "${CC:-cc}" -std=c99 -Wall -Wextra -Wpedantic -Werror -fsyntax-only -I "$prefix/include" -x c -
done

echo "::: the C library exports the C functions and nothing else"
library=$(find "$prefix" -name 'libfastdraft_c.so' -o -name 'libfastdraft_c.dylib')
case $library in
  *.so) exported=$(nm -D --defined-only "$library" | awk '{ print $NF }') ;;
  *) exported=$(nm -gU "$library" | awk '{ print substr($NF, 2) }') ;;
esac
declared=$(grep -oE 'fastdraft_[a-z_]+\(' "$prefix/include/fastdraft/c.h" | tr -d '(' | sort -u)
if ! diff <(echo "$declared") <(sort -u <<< "$exported"); then
  echo "the functions that c.h declares (<) and the symbols that are exported (>) differ" >&2
  exit 1
fi
echo "$declared" | wc -l

if command -v pkg-config > /dev/null; then
  echo "::: pkg-config"
  folder=$(dirname "$(find "$prefix" -name fastdraft_c.pc)")
  flags=$(PKG_CONFIG_PATH=$folder pkg-config --cflags --libs fastdraft_c)
  # shellcheck disable=SC2086
  "${CC:-cc}" -std=c99 examples/c/main.c -o "$work/c-pkg-config" $flags -Wl,-rpath,"$(dirname "$library")"
  "$work/c-pkg-config"
fi

echo "::: a version that is not compatible is refused"
mkdir "$work/newer"
printf '%s\n' 'cmake_minimum_required(VERSION 3.21)' 'project(newer LANGUAGES CXX)' \
  'find_package(fastdraft 99 REQUIRED)' > "$work/newer/CMakeLists.txt"
if cmake -S "$work/newer" -B "$work/newer/build" -DCMAKE_PREFIX_PATH="$prefix" > /dev/null 2>&1; then
  echo "find_package took fastdraft for version 99" >&2
  exit 1
fi

echo "::: a project with fastdraft in a subfolder"
build tests/cpp/subproject subproject "${together[@]}" "${as_it_is[@]}"
echo "the installed libraries work"
