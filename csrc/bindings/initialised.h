// Objects of the module's classes whose __init__ has not run are refused: for them pybind11
// would make up memory that no constructor has seen.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <type_traits>

#include "draft/successors.h"
#include "fastdraft/datastore.h"
#include "fastdraft/draft.h"
#include "fastdraft/engine.h"
#include "fastdraft/ngram_table.h"
#include "policy/back_off.h"
#include "policy/depth_acceptance.h"
#include "policy/step_latency.h"

namespace fastdraft::bindings {

// `Caster`, for a T, of initialised objects alone. Loading others throws TypeError. None stands
// for no T only where the caster makes smart pointers: self is never null.
template <typename T, typename Caster = pybind11::detail::type_caster_base<T>>
class InitialisedCaster : public Caster {
 public:
  bool load(pybind11::handle source, bool convert) {
    namespace detail = pybind11::detail;
    constexpr bool kSelf = std::is_same_v<Caster, detail::type_caster_base<T>>;
    if (kSelf && source.is_none()) return false;
    const detail::type_info* type = detail::get_type_info(typeid(T));
    if (type != nullptr && PyObject_TypeCheck(source.ptr(), type->type) != 0) {
      auto* instance = reinterpret_cast<detail::instance*>(source.ptr());
      if (!instance->get_value_and_holder(type).holder_constructed()) {
        throw pybind11::type_error(std::string(Py_TYPE(source.ptr())->tp_name) +
                                   ".__init__() must be called first");
      }
    }
    return Caster::load(source, convert);
  }
};

// The T of an object, for functions that take anything for self. Throws TypeError.
template <typename T>
const T& self_as(pybind11::handle self) {
  if (!pybind11::isinstance<T>(self)) {
    throw pybind11::type_error(
        "self must be a " + std::string(pybind11::str(pybind11::type::of<T>().attr("__name__"))) +
        ", got a " + Py_TYPE(self.ptr())->tp_name);
  }
  return self.cast<const T&>();
}

}  // namespace fastdraft::bindings

namespace pybind11::detail {

using fastdraft::bindings::InitialisedCaster;

template <>
class type_caster<fastdraft::DraftBatch> : public InitialisedCaster<fastdraft::DraftBatch> {};

template <>
class type_caster<fastdraft::NgramTableWriter>
    : public InitialisedCaster<fastdraft::NgramTableWriter> {};

template <>
class type_caster<fastdraft::NgramTable> : public InitialisedCaster<fastdraft::NgramTable> {};

template <>
class type_caster<std::shared_ptr<fastdraft::NgramTable>>
    : public InitialisedCaster<
          fastdraft::NgramTable,
          copyable_holder_caster<fastdraft::NgramTable, std::shared_ptr<fastdraft::NgramTable>>> {};

template <>
class type_caster<fastdraft::DatastoreWriter>
    : public InitialisedCaster<fastdraft::DatastoreWriter> {};

template <>
class type_caster<fastdraft::BackOff> : public InitialisedCaster<fastdraft::BackOff> {};

template <>
class type_caster<fastdraft::DepthAcceptance>
    : public InitialisedCaster<fastdraft::DepthAcceptance> {};

template <>
class type_caster<fastdraft::StepLatency> : public InitialisedCaster<fastdraft::StepLatency> {};

template <>
class type_caster<fastdraft::Successors> : public InitialisedCaster<fastdraft::Successors> {};

template <>
class type_caster<fastdraft::Datastore> : public InitialisedCaster<fastdraft::Datastore> {};

template <>
class type_caster<std::shared_ptr<fastdraft::Datastore>>
    : public InitialisedCaster<
          fastdraft::Datastore,
          copyable_holder_caster<fastdraft::Datastore, std::shared_ptr<fastdraft::Datastore>>> {};

}  // namespace pybind11::detail
