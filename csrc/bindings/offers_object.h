// The Python class Offers: what a drafter guesses for the rows of a batch.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fastdraft/offers.h"
#include "fastdraft/token.h"
#include "initialised.h"

namespace fastdraft::bindings {

using Floats = pybind11::array_t<float, pybind11::array::c_style | pybind11::array::forcecast>;

// Never changed once it is made, so that calls read its arrays without the GIL.
struct OffersObject {
  // The columns have an entry for each token, or are left out. Throws InvalidValueError.
  void check() const;
  // The same for the core, as offers of this kind.
  Offers columns(OfferKind number) const noexcept;

  std::string kind;
  std::vector<Token> token_ids;
  std::vector<std::int64_t> offsets;
  std::optional<std::vector<std::int32_t>> parents;
  std::optional<std::vector<float>> confidences;
  double time = 0.0;
  bool drawn = false;
};

}  // namespace fastdraft::bindings

namespace pybind11::detail {
template <>
class type_caster<fastdraft::bindings::OffersObject>
    : public InitialisedCaster<fastdraft::bindings::OffersObject> {};
}  // namespace pybind11::detail
