// Python objects that have a type in the stubs, and none in C++.
#pragma once

#include <pybind11/pybind11.h>

#include "fastdraft/config.h"

namespace fastdraft::bindings {

// Any object. `Type::name` is its type in a signature.
template <typename Type>
class TypedObject : public pybind11::object {
 public:
  PYBIND11_OBJECT_DEFAULT(TypedObject, pybind11::object, check)

 private:
  static bool check(PyObject*) { return true; }
};

struct ConfigType {
  static constexpr auto name = pybind11::detail::const_name("fastdraft.config.DraftConfig");
};
struct CalibrationType {
  static constexpr auto name = pybind11::detail::const_name("fastdraft.calibration.Calibration");
};
struct SessionType {
  static constexpr auto name = pybind11::detail::const_name("fastdraft.engine.Session");
};
struct StatsType {
  static constexpr auto name = pybind11::detail::const_name("fastdraft.stats.DraftStats");
};
struct ContinuationsType {
  static constexpr auto name =
      pybind11::detail::const_name("fastdraft.late.continuations.Continuations");
};
// The argument of `OffersOfCall`.
struct OffersType {
  static constexpr auto name = pybind11::detail::const_name(
      "fastdraft._core.Offers | collections.abc.Sequence[fastdraft._core.Offers]");
};
// The argument of `stores_of`.
struct StoresType {
  static constexpr auto name =
      pybind11::detail::const_name("collections.abc.Sequence[fastdraft._core.Datastore]");
};
using ConfigObject = TypedObject<ConfigType>;
using CalibrationObject = TypedObject<CalibrationType>;
using SessionObject = TypedObject<SessionType>;
using StatsObject = TypedObject<StatsType>;
using StoresObject = TypedObject<StoresType>;
using OffersArgument = TypedObject<OffersType>;
using ContinuationsObject = TypedObject<ContinuationsType>;

// The configuration that a DraftConfig describes. Throws InvalidValueError for fields of another
// type, for two drafters, and as EngineConfig::check does.
EngineConfig read_config(const ConfigObject& config);

}  // namespace fastdraft::bindings

namespace pybind11::detail {
template <typename Type>
struct handle_type_name<fastdraft::bindings::TypedObject<Type>> : Type {};
}  // namespace pybind11::detail
