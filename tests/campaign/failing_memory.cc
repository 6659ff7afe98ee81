// Preloaded: fails the allocation of the core that fail_at() chose, once or from there on.

#include <dlfcn.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

extern "C" void fail_at(long allocation, bool from_there_on);

namespace {

long waiting = 0;  // allocations up to the one that fails; 0 for none
bool goes_on = false;

bool fails() {
  if (waiting == 0 || --waiting > 0) return false;
  waiting = goes_on ? 1 : 0;
  return true;
}

bool is_of_core(const void* caller) {
  Dl_info info;
  return dladdr(caller, &info) != 0 && std::strstr(info.dli_fname, "_core.") != nullptr;
}

}  // namespace

extern "C" void fail_at(long allocation, bool from_there_on) {
  waiting = allocation;
  goes_on = from_there_on;
}

void* operator new(std::size_t bytes) {
  void* block = fails() ? nullptr : std::malloc(bytes);
  if (block == nullptr) throw std::bad_alloc();
  return block;
}

void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return fails() ? nullptr : std::malloc(bytes);
}

void* operator new(std::size_t bytes, std::align_val_t alignment) {
  const auto size = static_cast<std::size_t>(alignment);
  void* block = fails() ? nullptr : std::aligned_alloc(size, (bytes + size - 1) / size * size);
  if (block == nullptr) throw std::bad_alloc();
  return block;
}

void* operator new(std::size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  const auto size = static_cast<std::size_t>(alignment);
  return fails() ? nullptr : std::aligned_alloc(size, (bytes + size - 1) / size * size);
}

// The core's arrays of plain values; all other callers get what they ask for.
extern "C" void* realloc(void* block, std::size_t bytes) {
  using Realloc = void* (*)(void*, std::size_t);
  static const auto next = reinterpret_cast<Realloc>(dlsym(RTLD_NEXT, "realloc"));
  if (waiting > 0 && is_of_core(__builtin_return_address(0)) && fails()) return nullptr;
  return next(block, bytes);
}
