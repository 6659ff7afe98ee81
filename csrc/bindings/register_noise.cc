#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>

#include "fastdraft/error.h"
#include "register.h"

namespace fastdraft::bindings {
namespace {

using Numbers =
    pybind11::array_t<std::int64_t, pybind11::array::c_style | pybind11::array::forcecast>;

// Counters that go through the rounds side by side, so that compilers use vectors.
constexpr int kLanes = 8;

// The first two words of Philox4x32-10 for kLanes counters, as u of the random contract, which
// -log1p(-u) takes: below 1, since values nearest to 1 would round to it.
void draw(const std::int64_t* indices, std::uint64_t position, std::uint32_t stream,
          std::uint64_t seed, double* out) {
  std::uint32_t c0[kLanes];
  std::uint32_t c1[kLanes];
  std::uint32_t c2[kLanes];
  std::uint32_t c3[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    c0[i] = static_cast<std::uint32_t>(indices[i]);
    c1[i] = static_cast<std::uint32_t>(position);
    c2[i] = static_cast<std::uint32_t>(position >> 32);
    c3[i] = stream;
  }
  auto k0 = static_cast<std::uint32_t>(seed);
  auto k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kLanes; ++i) {
      const std::uint64_t a = std::uint64_t{0xD2511F53} * c0[i];
      const std::uint64_t b = std::uint64_t{0xCD9E8D57} * c2[i];
      c0[i] = static_cast<std::uint32_t>(b >> 32) ^ c1[i] ^ k0;
      c1[i] = static_cast<std::uint32_t>(b);
      c2[i] = static_cast<std::uint32_t>(a >> 32) ^ c3[i] ^ k1;
      c3[i] = static_cast<std::uint32_t>(a);
    }
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  for (int i = 0; i < kLanes; ++i) {
    // Both products are exact: one rounding, in the sum.
    const double u = c0[i] * 0x1p-32 + (c1[i] + 0.5) * 0x1p-64;
    out[i] = std::min(u, 1.0 - 0x1p-53);
  }
}

pybind11::array_t<double> uniform_noise(const Numbers& seeds, const Numbers& positions,
                                        const Numbers& indices, const Numbers& streams) {
  const pybind11::ssize_t rows = seeds.size();
  const pybind11::ssize_t n = indices.ndim() == 0 ? 1 : indices.shape(indices.ndim() - 1);
  const bool own_indices = indices.ndim() == 2;
  if (positions.size() != rows || (streams.size() != rows && streams.size() != 1) ||
      indices.size() != (own_indices ? rows * n : n)) {
    throw InvalidValueError("seeds, positions, indices and streams must be of the same rows");
  }
  pybind11::array_t<double> noise({rows, n});
  double* out = noise.mutable_data();
  const std::int64_t* of_row = indices.data();
  const pybind11::gil_scoped_release release;
  for (pybind11::ssize_t row = 0; row < rows; ++row) {
    const auto position = static_cast<std::uint64_t>(positions.data()[row]);
    const auto seed = static_cast<std::uint64_t>(seeds.data()[row]);
    const auto stream = static_cast<std::uint32_t>(streams.data()[streams.size() == 1 ? 0 : row]);
    for (pybind11::ssize_t i = 0; i < n; i += kLanes) {
      const pybind11::ssize_t left = std::min<pybind11::ssize_t>(kLanes, n - i);
      if (left == kLanes) {
        draw(of_row + i, position, stream, seed, out + i);
        continue;
      }
      std::int64_t last[kLanes] = {};
      double drawn[kLanes];
      std::copy_n(of_row + i, left, last);
      draw(last, position, stream, seed, drawn);
      std::copy_n(drawn, left, out + i);
    }
    out += n;
    if (own_indices) of_row += n;
  }
  return noise;
}

}  // namespace

void register_noise(pybind11::module_& module) {
  module.def("uniform_noise", &uniform_noise, pybind11::arg("seeds"), pybind11::arg("positions"),
             pybind11::arg("indices"), pybind11::arg("streams"),
             R"(The uniform numbers u of `fastdraft.kernels.sampled`, by Philox4x32-10.

seeds, positions: int64 (rows,); indices: int64 (n,), or (rows, n); streams: int64 (rows,), or one
for all rows. Returns float64 (rows, n). Raises InvalidValueError where the shapes do not agree.)");
}

}  // namespace fastdraft::bindings
