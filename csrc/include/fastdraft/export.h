// FASTDRAFT_EXPORT marks what a shared library exports. The static library needs no marks.
#pragma once

#if !defined(FASTDRAFT_SHARED)
#define FASTDRAFT_EXPORT
#else
#define FASTDRAFT_EXPORT __attribute__((visibility("default")))
#endif
