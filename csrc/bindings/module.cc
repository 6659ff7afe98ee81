#include <pybind11/pybind11.h>

#include "fastdraft/interrupt.h"
#include "register.h"
#include "signatures.h"

namespace {

unsigned long main_thread = 0;  // NOLINT(google-runtime-int): Python's type

// Python handles signals in its main thread.
void check_signals() {
  if (PyThread_get_thread_ident() != main_thread) return;
  const pybind11::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

}  // namespace

// Free-threaded interpreters may run calls side by side: the engine locks each
// request, and ThreadSanitizer agrees (tests/cpp/test_threads.cc).
PYBIND11_MODULE(_core_of_main, module, pybind11::mod_gil_not_used()) {
  module.doc() = "The C++ core of fastdraft.";
  fastdraft::bindings::register_errors(module);
  fastdraft::bindings::register_config(module);
  fastdraft::bindings::register_draft(module);
  fastdraft::bindings::register_datastore(module);
  fastdraft::bindings::register_ngram_table(module);
  fastdraft::bindings::register_noise(module);
  fastdraft::bindings::register_policy(module);
  fastdraft::bindings::register_offers(module);
  fastdraft::bindings::register_successors(module);
  fastdraft::bindings::register_engine(module);
  fastdraft::bindings::add_signatures(module);
  main_thread = PyThread_get_thread_ident();
  fastdraft::set_interrupt(&check_signals);
}

// pybind11 waits for ever in another interpreter of the process, from its first call on.
// Python names it. NOLINTNEXTLINE(bugprone-reserved-identifier)
extern "C" PYBIND11_EXPORT PyObject* PyInit__core() {
  if (PyInterpreterState_Get() == PyInterpreterState_Main()) return PyInit__core_of_main();
  PyErr_SetString(PyExc_ImportError, "fastdraft works in a process's main interpreter alone");
  return nullptr;
}
