// Objects of classes that are written in Python, named for the stubs.
#pragma once

#include <pybind11/pybind11.h>

#include "fastdraft/config.h"

namespace fastdraft::bindings {

// Adds nothing to pybind11::object but its place in a signature.
class TypedObject : public pybind11::object {
 public:
  PYBIND11_OBJECT(TypedObject, pybind11::object, check)

 private:
  static bool check(PyObject*) { return true; }
};

class ConfigObject : public TypedObject {
  using TypedObject::TypedObject;
};
class CalibrationObject : public TypedObject {
  using TypedObject::TypedObject;
};
class StatsObject : public TypedObject {
  using TypedObject::TypedObject;
};

// The name `name` of the Python module `module`.
inline pybind11::object from_python(const char* module, const char* name) {
  return pybind11::module_::import(module).attr(name);
}

// The configuration that a DraftConfig describes. Throws InvalidValueError for fields of another
// type, for two drafters, and as EngineConfig::check does.
EngineConfig read_config(const ConfigObject& config);

}  // namespace fastdraft::bindings

namespace pybind11::detail {
template <>
struct handle_type_name<fastdraft::bindings::ConfigObject> {
  static constexpr auto name = const_name("fastdraft.config.DraftConfig");
};
template <>
struct handle_type_name<fastdraft::bindings::CalibrationObject> {
  static constexpr auto name = const_name("fastdraft.calibration.Calibration");
};
template <>
struct handle_type_name<fastdraft::bindings::StatsObject> {
  static constexpr auto name = const_name("fastdraft.stats.DraftStats");
};
}  // namespace pybind11::detail
