#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fastdraft/datastore.h"
#include "fastdraft/error.h"
#include "fingerprint.h"
#include "numpy.h"
#include "register.h"
#include "store/documents.h"

namespace fastdraft::bindings {
namespace {

namespace py = pybind11;

void check_open(const Datastore& store) {
  if (store.closed()) throw DatastoreClosedError("the datastore is closed");
}

void add(Datastore& store, const Integers& token_ids, std::optional<std::int64_t> prompt_size,
         const std::optional<Datastore::Grow>& grow) {
  const IntegerArray<Token> tokens(token_ids, "token_ids");
  // Even a short document may have to wait for a long one.
  const py::gil_scoped_release release;
  store.add(tokens.data(), tokens.size(), prompt_size.value_or(tokens.size()),
            grow.value_or(nullptr));
}

void append(DatastoreWriter& writer, const Integers& token_ids, bool output) {
  const IntegerArray<Token> tokens(token_ids, "token_ids");
  const py::gil_scoped_release release;
  writer.append(tokens.data(), tokens.size(), output);
}

std::vector<std::tuple<std::int64_t, std::int32_t, bool>> find(const Datastore& store,
                                                               const Integers& token_ids, int most,
                                                               int links, std::int32_t least) {
  check_open(store);
  constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();
  check_range("most", most, 1, kAny);
  check_range("links", links, 1, kAny);
  check_range("least", least, 1, kAny);
  const IntegerArray<Token> text(token_ids, "token_ids");
  // No more are found than are looked at.
  std::vector<Occurrence> found(static_cast<std::size_t>(std::min(most, links)));
  const Datastore::Reader reader(store);
  const int count = reader.find(text.data(), text.size(), found.data(),
                                static_cast<int>(found.size()), links, least);
  std::vector<std::tuple<std::int64_t, std::int32_t, bool>> occurrences;
  for (int i = 0; i < count; ++i) {
    const Occurrence& occurrence = found[static_cast<std::size_t>(i)];
    occurrences.emplace_back(occurrence.next, occurrence.length, occurrence.output);
  }
  return occurrences;
}

py::array_t<Token> read(const Datastore& store, std::int64_t position, std::int64_t most) {
  check_open(store);
  check_range("most", most, 0, std::numeric_limits<std::int64_t>::max());
  // Documents are short where `most` may be anything, and text that is added waits for a step.
  constexpr std::int64_t kStep = 4096;
  std::vector<Token> tokens;
  std::int64_t count = 0;
  for (std::int64_t copied = kStep; copied == kStep && count < most; count += copied) {
    tokens.resize(static_cast<std::size_t>(count + std::min(kStep, most - count)));
    copied = Datastore::Reader(store).copy(position + count, tokens.data() + count,
                                           static_cast<std::int64_t>(tokens.size()) - count);
  }
  return py::array_t<Token>(count, tokens.data());
}

// Documents as bytes: tokens as a log has them, a negative one before each document, and then a
// byte for each, 1 where a model wrote it.
constexpr std::size_t kTextBytes = sizeof(Token) + 1;

std::pair<py::bytes, std::int64_t> dump(const Datastore& store, std::int64_t position,
                                        std::int64_t most) {
  check_open(store);
  std::string tokens;
  std::string outputs;
  {
    const py::gil_scoped_release release;
    for (std::int64_t left = most; left > 0;) {
      const LogPart part(store, position, left);
      position = part.end();
      if (part.size() == 0) break;
      tokens.append(reinterpret_cast<const char*>(part.tokens()),
                    static_cast<std::size_t>(part.size()) * sizeof(Token));
      outputs += part.outputs();
      left -= part.size();
    }
  }
  return {py::bytes(tokens + outputs), position};
}

void load(Datastore& store, const py::bytes& bytes, const std::optional<Datastore::Grow>& grow) {
  const std::string text(bytes);
  const py::gil_scoped_release release;
  const std::size_t count = text.size() / kTextBytes;
  if (count * kTextBytes != text.size()) {
    throw InvalidValueError("text must have " + std::to_string(kTextBytes) +
                            " bytes a token, got " + std::to_string(text.size()));
  }
  std::vector<Token> tokens(count);
  std::memcpy(tokens.data(), text.data(), count * sizeof(Token));
  const char* outputs = text.data() + count * sizeof(Token);
  const auto is_mark = [](Token token) { return token < 0; };
  for (auto begin = tokens.begin(); begin != tokens.end();) {
    const std::int64_t context = is_mark(*begin) ? mark_context(*begin++) : 0;
    const auto end = std::find_if(begin, tokens.end(), is_mark);
    std::int64_t prompt_size = end - begin;
    while (prompt_size > 0 && outputs[begin - tokens.begin() + prompt_size - 1] != 0) --prompt_size;
    store.add(tokens.data() + (begin - tokens.begin()), end - begin, prompt_size,
              grow.value_or(nullptr), context);
    begin = end;
  }
}

}  // namespace

void register_datastore(py::module_& module) {
  py::class_<Datastore, std::shared_ptr<Datastore>> store(module, "Datastore",
                                                          "The core of fastdraft.Datastore.");
  store.def(py::init([](std::int64_t max_bytes, const std::optional<py::bytes>& fingerprint) {
              return Datastore::live(max_bytes, fingerprint_of(fingerprint));
            }),
            py::kw_only(), py::arg("max_bytes"), py::arg("fingerprint"));
  store.def(
      py::init([](const py::bytes& name, const std::optional<py::bytes>& fingerprint, bool verify) {
        const std::string path = name;
        const std::optional<Fingerprint> expected = fingerprint_of(fingerprint);
        const py::gil_scoped_release release;
        return Datastore::open(path, expected, verify);
      }),
      py::kw_only(), py::arg("path"), py::arg("fingerprint"), py::arg("verify"));
  store.def(
      "_save",
      [](const Datastore& self, const py::bytes& name) {
        const std::string path = name;
        const py::gil_scoped_release release;
        self.save(path);
      },
      py::arg("path"));
  store.def("_dump", &dump, py::arg("position"), py::arg("most"),
            "The text from a position on, for `_load`, at most n tokens, and its end.");
  store.def("_load", &load, py::arg("text"), py::arg("grow"),
            "Adds the documents that `_dump` gave.");
  store.def("add", &add, py::arg("token_ids"), py::kw_only(), py::arg("prompt_size") = py::none(),
            py::arg("grow") = py::none(),
            R"(Adds a document to a live store.

token_ids: a list or a row of integers, 0 or greater. One of 4,194,303 or more, as no vocabulary
    has, ends what is drafted.
prompt_size: the tokens from here on are a model's output, which later outputs are more like than
    prompts are; by default none are.
grow: called, from 128 tokens to the next, before the oldest text would have to leave; it may raise
    the store's limit, and then nothing leaves.

The oldest text leaves as far as `max_bytes` asks. Once a prompt, of 32 tokens or more, has come
again, all prompts keep about as many samples: an old one may enter again instead of leaving, or
the document be left out where its prompt has more than others. What of the document's beginning already stands
in the store as a document's beginning is not stored again: from 32 tokens on, to the token. The
turns of a chat, each of which repeats the ones before, are thus stored once.

O(1) amortised a token. Requests that look something up meanwhile wait for microseconds. Raises
InvalidValueError, DatastoreClosedError, DatastoreError for a frozen store, or MemoryLimitError
where the machine has no memory, and then the document's first tokens were added.)");
  store.def("_find", &find, py::arg("token_ids"), py::arg("most"), py::arg("links"),
            py::arg("least"));
  store.def("read", &read, py::arg("position"), py::arg("most"),
            R"(The tokens from `position` on, to the document's end, at most `most`.

Returns an int32 array, empty where the position has left the store. Raises InvalidValueError or
DatastoreClosedError.)");
  store.def("close", &Datastore::close, py::call_guard<py::gil_scoped_release>(),
            R"(Frees the memory or the file. To requests the store is empty from now on.

Closing a closed store does nothing.)");
  store.def_property_readonly("closed", &Datastore::closed, "Whether it was closed.");
  store.def_property_readonly("frozen", &Datastore::frozen,
                              "Whether it is a file, to which nothing can be added.");
  store.def_property_readonly("num_documents", &Datastore::num_documents,
                              "The documents whose beginning is held.");
  store.def_property_readonly("_bytes", &Datastore::bytes);
  store.def_property_readonly("max_bytes", &Datastore::max_bytes,
                              "The limit of `bytes`; of a frozen store the file's size.");
  store.def("limit", &Datastore::limit, py::arg("max_bytes"),
            py::call_guard<py::gil_scoped_release>(),
            R"(Sets the limit of a live store, and returns it; the oldest text leaves as needed.

max_bytes: the new limit. The index keeps its memory, and the latest 1,364 tokens stay: where that
    is more, it is the limit. Closing the store frees all.

Raises InvalidValueError below 0, DatastoreError for a frozen store, or DatastoreClosedError.)");
  store.def_property_readonly(
      "fingerprint",
      [](const Datastore& self) -> std::optional<py::bytes> {
        return bytes_of(self.fingerprint());
      },
      "The fingerprint of the tokenizer that its tokens are of, 32 bytes, or None.");
  store.def_property_readonly(
      "begin", [](const Datastore& self) { return Datastore::Reader(self).begin(); },
      "The first position held.");
  store.def_property_readonly(
      "end", [](const Datastore& self) { return Datastore::Reader(self).end(); },
      "The position after the last one held.");
  store.def("__len__", &Datastore::num_tokens, "The tokens held.");

  py::class_<DatastoreWriter> writer(module, "DatastoreWriter",
                                     "The core of fastdraft.memory.datastore.DatastoreWriter.");
  writer.def(py::init([](const py::bytes& path, const std::optional<py::bytes>& fingerprint,
                         std::int64_t segment_tokens) {
               return std::make_unique<DatastoreWriter>(path, fingerprint_of(fingerprint),
                                                        segment_tokens);
             }),
             py::kw_only(), py::arg("path"), py::arg("fingerprint"), py::arg("segment_tokens"));
  writer.def(
      "begin_document", [](DatastoreWriter& self) { self.begin_document(); },
      py::call_guard<py::gil_scoped_release>(),
      R"(What is appended next is another document.

Raises DatastoreClosedError after `finish` or `discard`.)");
  writer.def("append", &append, py::arg("token_ids"), py::kw_only(), py::arg("output") = false,
             R"(Appends tokens to the document.

token_ids: a list or a row of integers, 0 or greater.
output: whether a model wrote them; such text resembles answers more than other text does.

O(1) a token; where a segment is full it is indexed and written, which takes seconds. Raises
InvalidValueError, DatastoreError where the file cannot be written, or DatastoreClosedError.)");
  writer.def(
      "append_all", [](DatastoreWriter& self, const Datastore& source) { self.append_all(source); },
      py::arg("source"), py::call_guard<py::gil_scoped_release>(),
      R"(Appends all documents of a store, frozen or live.

source: the store. A document that goes on in another segment of a file is two, the second with the
    first one's last 64 tokens.

O(1) a token. Raises DatastoreError where the file cannot be written, or DatastoreClosedError.)");
  writer.def("finish", &DatastoreWriter::finish, py::call_guard<py::gil_scoped_release>(),
             R"(Completes the file and moves it to its path.

Raises DatastoreError where it cannot be written, or DatastoreClosedError.)");
  writer.def("discard", &DatastoreWriter::discard, py::call_guard<py::gil_scoped_release>(),
             "Removes what was written so far; does nothing after `finish`.");
  writer.def_property_readonly("num_tokens", &DatastoreWriter::num_tokens,
                               "The tokens appended so far.");
  writer.def_property_readonly("num_documents", &DatastoreWriter::num_documents,
                               "The documents so far that are not empty.");
}

}  // namespace fastdraft::bindings
