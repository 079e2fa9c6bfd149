// `_core.NgramIndex`, `_core.SuffixIndex` and `_core.SuffixHistory`.

#include <algorithm>

#include "arguments.h"
#include "sagellm/ngram_index.h"
#include "sagellm/suffix_index.h"

namespace sage::python {

namespace {

using TokenArray = py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>;

constexpr std::size_t kReleaseAppended = 256;  // fewer take less time than handing the GIL over and back
constexpr std::size_t kCompared = 8;           // of the tokens that both know, before a text is taken for the same

// Tokens as the library takes them. Raises ValueError.
std::vector<std::int32_t> narrow(const std::int64_t* tokens, std::size_t count) {
  std::vector<std::int32_t> out(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (tokens[i] < 0 || tokens[i] > INT32_MAX) {
      throw py::value_error("token " + std::to_string(tokens[i]) + "; allowed are 0 to 2147483647.");
    }
    out[i] = static_cast<std::int32_t>(tokens[i]);
  }
  return out;
}

std::size_t checked(const char* what, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value >= low && value <= high) return static_cast<std::size_t>(value);
  throw py::value_error(std::string(what) + " is " + std::to_string(value) + "; allowed are " + std::to_string(low) + " to " +
                        std::to_string(high) + ".");
}

std::size_t size_of(const TokenArray& tokens) {
  if (tokens.ndim() == 1) return static_cast<std::size_t>(tokens.shape(0));
  throw py::value_error("tokens of " + std::to_string(tokens.ndim()) + " dimensions; one is needed.");
}

// An index, and whether a thread works on it without the GIL.
template <typename Index>
struct Guarded {
  Index index;
  bool is_busy = false;

  template <typename... Arguments>
  explicit Guarded(Arguments... arguments) : index(arguments...) {}

  void require_idle() const {
    if (is_busy) throw std::runtime_error("another thread uses this index; give each thread one of its own.");
  }

  template <typename Work>
  void work(std::size_t count, Work&& what) {
    if (count < kReleaseAppended) return what();
    struct Busy {
      bool& flag;
      explicit Busy(bool& is_set) : flag(is_set) { flag = true; }
      ~Busy() { flag = false; }
    } const busy(is_busy);
    const py::gil_scoped_release release;
    what();
  }
};

template <typename Index>
void append(Guarded<Index>& self, const TokenArray& tokens) {
  self.require_idle();
  const auto narrowed = narrow(tokens.data(), size_of(tokens));
  self.work(narrowed.size(), [&] { self.index.append(narrowed.data(), narrowed.size()); });
}

template <typename Index>
void follow(Guarded<Index>& self, const TokenArray& tokens) {
  self.require_idle();
  const std::size_t count = size_of(tokens);
  const auto& text = self.index.text();
  const std::int64_t* const data = tokens.data();
  const bool goes_on = count >= text.size() && std::equal(text.begin(), text.end(), data);
  const std::size_t known = goes_on ? text.size() : 0;
  const auto rest = narrow(data + known, count - known);
  self.work(rest.size(), [&] {
    if (!goes_on) self.index.clear();
    self.index.append(rest.data(), rest.size());
  });
}

// Before a proposal: the index is to hold `tokens`, which it does unless somebody forgot to tell.
template <typename Index>
void ensure(Guarded<Index>& self, const TokenArray& tokens) {
  self.require_idle();
  const std::size_t count = size_of(tokens);
  const auto& text = self.index.text();
  const std::size_t compared = std::min(kCompared, count);
  const bool is_same = count == text.size() && std::equal(text.end() - static_cast<std::ptrdiff_t>(compared), text.end(),
                                                          tokens.data() + (count - compared));
  if (!is_same) follow(self, tokens);
}

template <typename Index>
py::array_t<std::int32_t> tokens_from(const Guarded<Index>& self, std::int64_t start) {
  self.require_idle();
  const auto& text = self.index.text();
  const std::size_t first = checked("start", start, 0, static_cast<std::int64_t>(text.size()));
  return py::array_t<std::int32_t>(static_cast<py::ssize_t>(text.size() - first), text.data() + first);
}

py::list to_list(const std::vector<std::int32_t>& tokens) {
  py::list out(tokens.size());
  for (std::size_t i = 0; i < tokens.size(); ++i) out[i] = py::int_(tokens[i]);
  return out;
}

using Ngrams = Guarded<NgramIndex>;
using Suffixes = Guarded<SuffixIndex>;
using History = Guarded<SuffixHistory>;

constexpr std::int64_t kMaxGram = 32, kMaxTreeDepth = 128, kMaxHistory = std::int64_t{1} << 28, kMaxLimit = 1 << 16;

std::unique_ptr<Ngrams> make_ngrams(std::int64_t min_n, std::int64_t max_n) {
  const std::size_t low = checked("min_n", min_n, 1, kMaxGram);
  return std::make_unique<Ngrams>(low, checked("max_n", max_n, min_n, kMaxGram));
}

std::unique_ptr<Suffixes> make_suffixes(std::int64_t max_depth) {
  return std::make_unique<Suffixes>(checked("max_depth", max_depth, 2, kMaxTreeDepth));
}

std::unique_ptr<History> make_history(std::int64_t max_depth, std::int64_t max_tokens) {
  const std::size_t depth = checked("max_depth", max_depth, 2, kMaxTreeDepth);
  return std::make_unique<History>(depth, checked("max_tokens", max_tokens, 0, kMaxHistory));
}

py::list propose_ngrams(Ngrams& self, const TokenArray& tokens, std::int64_t limit) {
  ensure(self, tokens);
  std::vector<std::int32_t> out;
  self.index.propose(checked("limit", limit, 0, kMaxLimit), out);
  return to_list(out);
}

py::list propose_suffixes(Suffixes& self, const TokenArray& tokens, std::int64_t limit, double min_probability,
                          const History* history) {
  ensure(self, tokens);
  if (history != nullptr) history->require_idle();
  SuffixGuess best;
  self.index.propose(checked("limit", limit, 0, kMaxLimit), min_probability, history ? &history->index : nullptr, best);
  return to_list(best.tokens);
}

// (tokens, parents, chances)
py::tuple propose_suffix_tree(Suffixes& self, const TokenArray& tokens, std::int64_t limit, double min_probability,
                              const History* history) {
  ensure(self, tokens);
  if (history != nullptr) history->require_idle();
  SuffixGuessTree found;
  self.index.propose_tree(checked("limit", limit, 0, kMaxLimit), min_probability, history ? &history->index : nullptr, found);
  return py::make_tuple(to_list(found.tokens), to_list(found.parents), py::cast(found.chances));
}

template <typename Index>
void bind_text(py::class_<Guarded<Index>>& type) {
  type.def("append", &append<Index>, py::arg("tokens"))
      .def("follow", &follow<Index>, py::arg("tokens"))
      .def("tokens", &tokens_from<Index>, py::arg("start") = 0)
      .def("__len__", [](const Guarded<Index>& self) { return self.index.text().size(); })
      .def_property_readonly("num_bytes", [](const Guarded<Index>& self) { return self.index.num_bytes(); });
}

}  // namespace

void bind_speculative(py::module_& module) {
  py::class_<Ngrams> ngrams(module, "NgramIndex");
  ngrams.def(py::init(&make_ngrams), py::arg("min_n"), py::arg("max_n"))
      .def("propose", &propose_ngrams, py::arg("tokens"), py::arg("limit"));
  bind_text(ngrams);
  py::class_<Suffixes> suffixes(module, "SuffixIndex");
  suffixes.def(py::init(&make_suffixes), py::arg("max_depth"))
      .def("propose", &propose_suffixes, py::arg("tokens"), py::arg("limit"), py::arg("min_probability"),
           py::arg("history") = nullptr)
      .def("propose_tree", &propose_suffix_tree, py::arg("tokens"), py::arg("limit"), py::arg("min_probability"),
           py::arg("history") = nullptr);
  bind_text(suffixes);
  py::class_<History>(module, "SuffixHistory")
      .def(py::init(&make_history), py::arg("max_depth"), py::arg("max_tokens"))
      .def("add", [](History& self, const TokenArray& tokens) {
            self.require_idle();
            const auto narrowed = narrow(tokens.data(), size_of(tokens));
            self.work(narrowed.size(), [&] { self.index.add(narrowed.data(), narrowed.size()); });
          }, py::arg("tokens"))
      .def("__len__", [](const History& self) { return self.index.num_tokens(); })
      .def_property_readonly("num_bytes", [](const History& self) { return self.index.num_bytes(); });
}

}  // namespace sage::python
