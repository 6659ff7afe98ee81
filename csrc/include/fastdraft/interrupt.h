// How a host language ends a call that takes long, such as by Ctrl-C.
#pragma once

#include "fastdraft/export.h"

namespace fastdraft {

// Calls that take long call it about every 50 ms, from the thread that made them, without a lock
// that another kind of call waits for. What it throws ends the call.
using Interrupt = void (*)();

// The process's function; null: none.
FASTDRAFT_EXPORT void set_interrupt(Interrupt interrupt) noexcept;
FASTDRAFT_EXPORT void check_interrupt();

}  // namespace fastdraft
