# CMake includes this where the build of llama-cpp-python begins.

# The package asks for llama.cpp's library of command lines and chat formats, nearly half of the
# build, and uses nothing of it.
set(LLAMA_BUILD_COMMON OFF)
# Tests decode a few tokens: compiling takes longer.
set(CMAKE_C_FLAGS_RELEASE "-O1 -DNDEBUG")
set(CMAKE_CXX_FLAGS_RELEASE "-O1 -DNDEBUG")
