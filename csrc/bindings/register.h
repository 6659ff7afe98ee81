// One function for each noun that the module shows to Python.
#pragma once

#include <pybind11/pybind11.h>

#include "initialised.h"

namespace fastdraft::bindings {

void register_errors(pybind11::module_& module);
void register_config(pybind11::module_& module);
void register_draft(pybind11::module_& module);
void register_datastore(pybind11::module_& module);
void register_ngram_table(pybind11::module_& module);
void register_noise(pybind11::module_& module);
void register_policy(pybind11::module_& module);
void register_offers(pybind11::module_& module);
void register_successors(pybind11::module_& module);
void register_engine(pybind11::module_& module);

}  // namespace fastdraft::bindings
