#include <pybind11/pybind11.h>

#include "register.h"
#include "signatures.h"

// Free-threaded interpreters may run calls side by side: the engine locks each
// request, and ThreadSanitizer agrees (tests/cpp/test_threads.cc).
PYBIND11_MODULE(_core, module, pybind11::mod_gil_not_used()) {
  module.doc() = "The C++ core of fastdraft.";
  fastdraft::bindings::register_errors(module);
  fastdraft::bindings::register_config(module);
  fastdraft::bindings::register_draft(module);
  fastdraft::bindings::register_datastore(module);
  fastdraft::bindings::register_step_latency(module);
  fastdraft::bindings::register_successors(module);
  fastdraft::bindings::register_engine(module);
  fastdraft::bindings::add_signatures(module);
}
