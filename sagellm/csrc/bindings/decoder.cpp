// `_core.CpuTeam`, `_core.CpuKernels` and `_core.CpuDecoder`. Tensors come as addresses; sagellm/engines/lmdeploy/cpu
// checks their shapes and keeps them alive.

#include <algorithm>

#include "sagellm/decoder.h"

#include "arguments.h"

namespace sage::python {

namespace {

using Address = std::uintptr_t;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

Dtype dtype_of(const std::string& name) {
  if (name == "float32") return Dtype::kFloat32;
  if (name == "bfloat16") return Dtype::kBFloat16;
  throw py::value_error("dtype is '" + name + "'; use float32 or bfloat16.");
}

Activation activation_of(const std::string& name) {
  if (name.empty()) return Activation::kNone;
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  throw py::value_error("activation is '" + name + "'; use silu or gelu.");
}

Format format_of(const std::string& name) {
  if (name == "plain") return Format::kPlain;
  if (name == "levels4") return Format::kLevels4;
  if (name == "levels5") return Format::kLevels5;
  if (name == "levels6") return Format::kLevels6;
  if (name == "levels8") return Format::kLevels8;
  if (name == "float8") return Format::kFloat8;
  throw py::value_error("format is '" + name + "'; use plain, levels4, levels5, levels6, levels8 or float8.");
}

Sharing sharing_of(const std::string& name) {
  if (name == "never") return Sharing::kNever;
  if (name == "where it pays") return Sharing::kWhereItPays;
  if (name == "always") return Sharing::kAlways;
  throw py::value_error("sharing is '" + name + "'; use never, where it pays or always.");
}

Matrix matrix_of(const py::dict& given) {
  Matrix matrix;
  matrix.weight = at<const void>(given["weight"].cast<Address>());
  matrix.bias = at<const float>(given["bias"].cast<Address>());
  matrix.outputs = given["outputs"].cast<int>();
  matrix.inputs = given["inputs"].cast<int>();
  if (given.contains("format")) {
    matrix.format = format_of(given["format"].cast<std::string>());
    if (given.contains("order")) matrix.order = at<const std::int32_t>(given["order"].cast<Address>());
    matrix.block = given["block"].cast<int>();
    matrix.in_8_bits = given.contains("in_8_bits");
  }
  return matrix;
}

// A part that the layer does not have is None.
Matrix optional_matrix_of(const py::object& given) { return given.is_none() ? Matrix{} : matrix_of(given); }

Experts experts_of(const py::object& given) {
  Experts experts;
  if (given.is_none()) return experts;
  experts.router = matrix_of(given["router"]);
  for (const py::handle each : given["gate_up"]) experts.gate_up.push_back(matrix_of(each.cast<py::dict>()));
  for (const py::handle each : given["down"]) experts.down.push_back(matrix_of(each.cast<py::dict>()));
  experts.top_k = given["top_k"].cast<int>();
  experts.renormalize = given["renormalize"].cast<bool>();
  return experts;
}

DecoderLayer layer_of(const py::dict& given) {
  const auto numbers = [&](const char* name) { return at<const float>(given[name].cast<Address>()); };
  DecoderLayer layer;
  layer.qkv = matrix_of(given["qkv"]);
  layer.out = matrix_of(given["out"]);
  layer.gate_up = optional_matrix_of(given["gate_up"]);
  layer.down = optional_matrix_of(given["down"]);
  layer.experts = experts_of(given["experts"]);
  layer.attention_norm = numbers("attention_norm");
  layer.feed_forward_norm = numbers("feed_forward_norm");
  layer.after_attention = numbers("after_attention");
  layer.after_feed_forward = numbers("after_feed_forward");
  layer.query_norm = numbers("query_norm");
  layer.key_norm = numbers("key_norm");
  layer.window = given["window"].cast<int>();
  return layer;
}

DecoderShape shape_of(const py::dict& given) {
  DecoderShape shape;
  shape.hidden = given["hidden"].cast<int>();
  shape.heads = given["heads"].cast<int>();
  shape.kv_heads = given["kv_heads"].cast<int>();
  shape.head_size = given["head_size"].cast<int>();
  shape.vocabulary = given["vocabulary"].cast<int>();
  shape.epsilon = given["epsilon"].cast<float>();
  shape.attention_scale = given["attention_scale"].cast<float>();
  shape.softcap = given["softcap"].cast<float>();
  shape.logit_softcap = given["logit_softcap"].cast<float>();
  shape.embedding_scale = given["embedding_scale"].cast<float>();
  shape.activation = activation_of(given["activation"].cast<std::string>());
  if (given.contains("ranks")) {
    shape.ranks = given["ranks"].cast<int>();
    shape.rank = given["rank"].cast<int>();
    shape.replicas = given["replicas"].cast<int>();
    shape.logits = given["logits"].cast<int>();
  }
  return shape;
}

template <typename T>
std::vector<T> numbers_of(const py::dict& given, const char* name) {
  return given.contains(name) ? given[name].cast<std::vector<T>>() : std::vector<T>{};
}

Sampling sampling_of(const py::dict& given) {
  Sampling wishes;
  wishes.rows = given["rows"].cast<int>();
  wishes.vocabulary = given["vocabulary"].cast<int>();
  wishes.temperature = numbers_of<float>(given, "temperature");
  wishes.repetition_penalty = numbers_of<float>(given, "repetition_penalty");
  wishes.top_p = numbers_of<float>(given, "top_p");
  wishes.min_p = numbers_of<float>(given, "min_p");
  wishes.top_k = numbers_of<std::int64_t>(given, "top_k");
  wishes.seeds = numbers_of<std::int64_t>(given, "seeds");
  wishes.offsets = numbers_of<std::int64_t>(given, "offsets");
  wishes.seen.tokens = numbers_of<std::int64_t>(given, "seen");
  wishes.forbidden.tokens = numbers_of<std::int64_t>(given, "forbidden");
  wishes.forbidden.marks = numbers_of<std::uint8_t>(given, "forbidden_marks");
  const auto width_of = [&](const Sampling::Words& words) {
    return wishes.rows == 0 ? 0 : static_cast<int>(words.tokens.size()) / wishes.rows;
  };
  wishes.seen.width = width_of(wishes.seen);
  wishes.forbidden.width = width_of(wishes.forbidden);
  wishes.num_logprobs = given["num_logprobs"].cast<int>();
  check(wishes);
  return wishes;
}

// (token, log probabilities, their tokens) of each row.
py::list sampled_list(const std::vector<Sampled>& rows) {
  py::list found;
  for (const Sampled& row : rows) found.append(py::make_tuple(row.token, row.logprobs, row.ids));
  return found;
}

// How a decode step chooses blocks. `choose` gets (layer, queries [sequences, heads, head size], weights [sequences, key heads,
// table width], result [sequences, choices, most]) as addresses, and returns what is wrong.
std::shared_ptr<const Sparse> sparse_of(const py::dict& given) {
  auto sparse = std::make_shared<Sparse>();
  sparse->keep = given["keep"].cast<std::vector<int>>();
  const auto weights = given["weights"].cast<std::string>();
  sparse->weights = weights == "bounds"  ? Sparse::Weights::kBounds
                    : weights == "spread" ? Sparse::Weights::kSpread
                    : weights == "codes" ? Sparse::Weights::kCodes
                    : weights == "exact" ? Sparse::Weights::kExact
                                         : Sparse::Weights::kNone;
  sparse->reach = given["reach"].cast<float>();
  sparse->whole_layers = given["whole_layers"].cast<int>();
  sparse->by_head = given["by_head"].cast<bool>();
  sparse->first = given["first"].cast<int>();
  sparse->last = given["last"].cast<int>();
  if (!given["choose"].is_none()) {
    // The step runs without the interpreter's lock, on any thread of the team; the dictionary keeps the function alive.
    sparse->choose = [choose = py::handle(given["choose"])](const Sparse::View& view) -> std::string {
      const py::gil_scoped_acquire lock;
      try {
        const auto address = [](const void* from) { return reinterpret_cast<Address>(from); };
        return choose(view.layer, address(view.queries), address(view.weights), address(view.chosen)).cast<std::string>();
      } catch (const std::exception& error) {
        return error.what();
      }
    };
  }
  return sparse;
}

// How a step of prompts chooses blocks: `counts` and `positions`, or what an estimate goes by.
std::shared_ptr<const SparsePrompts> sparse_prompts_of(const py::dict& given) {
  auto sparse = std::make_shared<SparsePrompts>();
  if (given.contains("counts")) {
    sparse->counts = given["counts"].cast<std::vector<int>>();
    sparse->positions = given["positions"].cast<std::vector<std::int64_t>>();
    return sparse;
  }
  sparse->stride = given["stride"].cast<int>();
  sparse->share = given["share"].cast<float>();
  sparse->threshold = given["threshold"].cast<float>();
  sparse->min_blocks = given["min_blocks"].cast<int>();
  sparse->first = given["first"].cast<int>();
  sparse->last = given["last"].cast<int>();
  sparse->whole_layers = given["whole_layers"].cast<int>();
  return sparse;
}

// `queries` of each sequence, and where to add their weights.
std::shared_ptr<const Observed> observed_of(const py::dict& given) {
  return std::make_shared<const Observed>(
      Observed{given["queries"].cast<std::vector<int>>(), at<float>(given["weights"].cast<Address>())});
}

// A decoder and the cache that it was bound to.
class BoundDecoder {
 public:
  BoundDecoder(const CpuKernels& kernels, const py::dict& shape, const py::list& layers, const py::dict& embedding,
               Address last_norm, const py::dict& head)
      : decoder_(kernels, shape_of(shape), layers_of(layers), matrix_of(embedding), at<const float>(last_norm),
                 matrix_of(head)) {}

  // `cache`: addresses, strides and names, as `PagedCache` has them.
  void bind(const py::dict& cache) {
    const auto addresses = [&](const char* name) {
      std::vector<char*> found;
      for (const py::handle each : cache[name]) found.push_back(at<char>(each.cast<Address>()));
      return found;
    };
    const auto bytes = [&](const char* name) { return cache[name].cast<std::size_t>(); };
    PagedCache bound;
    bound.keys = addresses("keys");
    bound.values = addresses("values");
    bound.key_scales = addresses("key_scales");
    bound.value_scales = addresses("value_scales");
    bound.num_blocks = cache["num_blocks"].cast<int>();
    bound.block_size = cache["block_size"].cast<int>();
    bound.block_stride = bytes("block_stride");
    bound.slot_stride = bytes("slot_stride");
    bound.scale_block_stride = bytes("scale_block_stride");
    bound.scale_slot_stride = bytes("scale_slot_stride");
    bound.format = format_of(cache["format"].cast<std::string>());
    bound.dtype = dtype_of(cache["dtype"].cast<std::string>());
    bound.bounds = at<float>(cache["bounds"].cast<Address>());
    bound.codes = at<std::uint8_t>(cache["codes"].cast<Address>());
    bound.key_sums = at<std::int32_t>(cache["key_sums"].cast<Address>());
    cache_ = bound;
  }

  int prompt_tile() const { return decoder_.prompt_tile(); }
  bool takes_trees() const { return decoder_.takes_trees(cache_); }
  void move(const std::vector<std::pair<std::int64_t, std::int64_t>>& slots) const { decoder_.move(cache_, slots); }

  // Turns a step without guesses into the one after it, in which each sequence has the token that it has drawn. Returns how
  // many positions need angles. Tensors take seven times as long in Python: a step has pushed their code out of the caches.
  static std::int64_t advance(const py::dict& tensors, const std::vector<std::int64_t>& tokens) {
    const auto numbers = [&](const char* name) { return at<std::int64_t>(tensors[name].cast<Address>()); };
    const auto is_count = [&](const char* name) { return tensors[name].cast<std::size_t>() == tokens.size(); };
    if (!is_count("num_tokens") || !is_count("num_sequences")) {
      throw std::invalid_argument("a step that goes on has one token of each sequence, and each has drawn one");
    }
    std::int64_t *const last = numbers("tokens"), *const positions = numbers("positions"), *const lengths = numbers("lengths");
    std::int64_t farthest = 0;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      last[i] = tokens[i];
      ++lengths[i];
      farthest = std::max(farthest, ++positions[i]);
    }
    return farthest + 1;
  }

  // `tensors`: addresses and sizes, as `DecoderStep` has them. Draws tokens if there are wishes. Returns them, and
  // `StepReport`'s fields.
  py::tuple run(Team& team, const py::dict& tensors, const py::object& wishes, const py::object& sparse,
                const py::object& exchanges) {
    const auto numbers = [&](const char* name) { return at<const std::int64_t>(tensors[name].cast<Address>()); };
    DecoderStep step;
    step.is_decoding = tensors["is_decoding"].cast<bool>();
    step.num_tokens = tensors["num_tokens"].cast<int>();
    step.num_sequences = tensors["num_sequences"].cast<int>();
    step.table_width = tensors["table_width"].cast<int>();
    step.tokens = numbers("tokens");
    step.query_lengths = numbers("query_lengths");
    step.lengths = numbers("lengths");
    step.tables = numbers("tables");
    step.positions = numbers("positions");
    step.angles = at<const float>(tensors["angles"].cast<Address>());
    step.num_angles = tensors["num_angles"].cast<int>();
    step.hidden = at<void>(tensors["hidden"].cast<Address>());
    std::vector<Sampled> sampled;
    if (!wishes.is_none()) {
      step.sampling = std::make_shared<const Sampling>(sampling_of(wishes));
      step.sampled = &sampled;
    }
    if (!exchanges.is_none()) {
      for (const py::handle each : exchanges) {
        const auto way = each.cast<py::tuple>();
        step.exchanges.push_back({way[0].cast<Exchange*>(), way[1].cast<int>(), way[2].cast<bool>()});
      }
    }
    step.sharing = sharing_of(tensors["sharing"].cast<std::string>());
    if (!sparse.is_none()) step.sparse = sparse_of(sparse);
    PagedCache without_sums;
    const bool is_repeated = tensors.contains("is_repeated");
    if (is_repeated) {  // they have the keys of a step that ran before
      without_sums = cache_;
      without_sums.key_sums = nullptr;
    }
    if (tensors.contains("parents")) step.parents = numbers("parents");
    if (tensors.contains("prompts")) step.sparse_prompts = sparse_prompts_of(tensors["prompts"]);
    if (tensors.contains("observed")) step.observed = observed_of(tensors["observed"]);
    StepReport report;
    {
      const py::gil_scoped_release release;
      report = decoder_.run(team, is_repeated ? without_sums : cache_, step);
    }
    return py::make_tuple(sampled_list(sampled), report.failure, report.prompt_blocks, report.exchange_s);
  }

 private:
  static std::vector<DecoderLayer> layers_of(const py::list& given) {
    std::vector<DecoderLayer> layers;
    for (const py::handle layer : given) layers.push_back(layer_of(py::reinterpret_borrow<py::dict>(layer)));
    return layers;
  }

  Decoder decoder_;
  PagedCache cache_;
};

using Release = py::call_guard<py::gil_scoped_release>;

}  // namespace

void bind_decoder(py::module_& module) {
  module.def(
      "packed_levels_bytes", [](const py::dict& matrix) { return packed_levels_bytes(matrix_of(matrix)); },
      py::arg("matrix"));
  module.def(
      "pack_levels",
      [](const py::dict& matrix, Address levels, Address scales, Address offsets, Address packed) {
        const Matrix wanted = matrix_of(matrix);
        const py::gil_scoped_release release;
        pack_levels(wanted, at<const std::int8_t>(levels), at<const std::uint16_t>(scales),
                    at<const std::uint16_t>(offsets), at<void>(packed));
      },
      py::arg("matrix"), py::arg("levels"), py::arg("scales"), py::arg("offsets"), py::arg("packed"));
  py::class_<Team>(module, "CpuTeam")
      .def(py::init<int>(), py::arg("threads"))
      .def_property_readonly("threads", &Team::threads)
      .def_property_readonly("repeated", &Team::repeated);
  py::class_<CpuKernels>(module, "CpuKernels")
      .def(py::init([](const std::string& dtype, const std::string& isa) {
             return std::make_unique<CpuKernels>(isa.c_str(), dtype_of(dtype));
           }),
           py::arg("dtype"), py::arg("isa") = "")
      .def_property_readonly("isa", &CpuKernels::isa)
      .def_property_readonly(
          "inputs",
          [](const CpuKernels& kernels) { return kernels.inputs() == Dtype::kFloat32 ? "float32" : "bfloat16"; })
      .def_property_readonly("has_8_bits", &CpuKernels::has_8_bits)
      .def("packed_bytes", &CpuKernels::packed_bytes, py::arg("outputs"), py::arg("inputs"))
      .def(
          "pack",
          [](const CpuKernels& kernels, Address source, std::size_t stride, int outputs, int inputs, Address packed) {
            kernels.pack(at<const void>(source), stride, outputs, inputs, at<void>(packed));
          },
          py::arg("source"), py::arg("stride"), py::arg("outputs"), py::arg("inputs"), py::arg("packed"), Release())
      .def(
          "unpack",
          [](const CpuKernels& kernels, const py::dict& matrix, Address rows, int count, Address to) {
            kernels.unpack(matrix_of(matrix), at<const std::int64_t>(rows), count, at<float>(to));
          },
          py::arg("matrix"), py::arg("rows"), py::arg("count"), py::arg("to"))
      .def(
          "sample",
          [](const CpuKernels& kernels, Address logits, const py::dict& given) {
            const Sampling wishes = sampling_of(given);
            std::vector<Sampled> sampled;
            {
              const py::gil_scoped_release release;
              std::vector<float> scratch(static_cast<std::size_t>(wishes.vocabulary));
              for (int row = 0; row < wishes.rows; ++row) {
                const auto skipped = static_cast<std::size_t>(row) * scratch.size();
                sampled.push_back(
                    sample_row(kernels.table(), at<const float>(logits) + skipped, wishes, row, scratch.data()));
              }
            }
            return sampled_list(sampled);
          },
          py::arg("logits"), py::arg("wishes"))
      .def(
          "multiply",
          [](const CpuKernels& kernels, Team& team, const py::dict& matrix, const std::string& gate, Address input,
             int rows, Address out, int outputs, bool wide) {
            const Matrix weight = matrix_of(matrix);
            const Activation activation = activation_of(gate);
            const py::gil_scoped_release release;
            multiply(team, kernels, weight, activation, at<const void>(input), rows, at<void>(out), outputs, wide);
          },
          py::arg("team"), py::arg("matrix"), py::arg("gate"), py::arg("input"), py::arg("rows"), py::arg("out"),
          py::arg("outputs"), py::arg("wide"));
  py::class_<BoundDecoder>(module, "CpuDecoder")
      .def(py::init<const CpuKernels&, const py::dict&, const py::list&, const py::dict&, Address, const py::dict&>(),
           py::arg("kernels"), py::arg("shape"), py::arg("layers"), py::arg("embedding"), py::arg("last_norm"),
           py::arg("head"), py::keep_alive<1, 2>())
      .def("bind", &BoundDecoder::bind, py::arg("cache"))
      .def_property_readonly("prompt_tile", &BoundDecoder::prompt_tile)
      .def_property_readonly("takes_trees", &BoundDecoder::takes_trees)
      .def("move", &BoundDecoder::move, py::arg("slots"), Release())
      .def_static("advance", &BoundDecoder::advance, py::arg("tensors"), py::arg("tokens"))
      .def("run", &BoundDecoder::run, py::arg("team"), py::arg("tensors"), py::arg("wishes") = py::none(),
           py::arg("sparse") = py::none(), py::arg("exchanges") = py::none());
}

}  // namespace sage::python
