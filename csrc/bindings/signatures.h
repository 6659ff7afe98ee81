// Signatures for inspect.signature and help(), and the texts of repr().
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace fastdraft::bindings {

// The beginning of a docstring from which Python makes __text_signature__, "name(a, *,
// b=1)\n--\n\n", read from the first line that pybind11 wrote into `doc`; empty where it has no
// such line. `self` is the name of the first parameter there; an empty one leaves it out, and a
// static method has none.
std::string text_signature(const std::string& name, const std::string& doc,
                           const std::string& self);

// Gives all classes of the module, and the methods that pybind11 made, their signatures.
void add_signatures(pybind11::module_& module);

// Defines `method` of a class as fastdraft._describe.`function`, which takes the object and returns
// a string. `check` throws TypeError for an object of another class.
void def_described(const pybind11::object& type, const char* method, const char* function,
                   void (*check)(const pybind11::handle& self));

}  // namespace fastdraft::bindings
