# CMake includes this where the build of llama-cpp-python begins.

# The package asks for llama.cpp's library of command lines and chat formats, nearly half of the
# build, and uses nothing of it.
set(LLAMA_BUILD_COMMON OFF)
# Further ways to multiply the same matrices.
set(GGML_CPU_REPACK OFF)
set(GGML_LLAMAFILE OFF)
# Tests decode a few tokens: compiling takes longer.
set(CMAKE_C_FLAGS_RELEASE "-O1 -DNDEBUG")
set(CMAKE_CXX_FLAGS_RELEASE "-O1 -DNDEBUG")

# Half of what is left is reading the same headers again, and making quick what calls the kernels.
function(fastdraft_compile_sooner)
  target_compile_options(llama PRIVATE -O0)
  target_precompile_headers(
    llama PRIVATE "${CMAKE_SOURCE_DIR}/vendor/llama.cpp/src/models/models.h")
endfunction()
cmake_language(DEFER CALL fastdraft_compile_sooner)
