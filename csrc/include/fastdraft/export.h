// FASTDRAFT_EXPORT marks what a shared library exports. The static library needs no marks.
#pragma once

#if !defined(FASTDRAFT_SHARED)
#define FASTDRAFT_EXPORT
#elif !defined(_WIN32)
#define FASTDRAFT_EXPORT __attribute__((visibility("default")))
#elif defined(FASTDRAFT_BUILDING)
#define FASTDRAFT_EXPORT __declspec(dllexport)
#else
#define FASTDRAFT_EXPORT __declspec(dllimport)
#endif
