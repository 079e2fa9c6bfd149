// `_core.HookTable` and `_core.PluginPort`: TurboMind's hook table, and the questions it puts to Python.

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <optional>
#include <thread>

#include "arguments.h"
#include "sagellm/hook_table.h"
#include "sagellm/plugin_port.h"

namespace sage::python {

namespace {

constexpr PortTopic kTopics[] = {kAskVictims,  kAskSchedule, kAskAdmit,     kTellEvicted,
                                 kTellMatched, kTellStored,  kTellStepEnd, kTellCollective};

std::uint32_t parse_topics(const std::vector<std::string>& names) {
  std::uint32_t topics = 0;
  for (const std::string& name : names) {
    const auto* const found =
        std::find_if(std::begin(kTopics), std::end(kTopics), [&](PortTopic topic) { return name == topic_name(topic); });
    if (found == std::end(kTopics)) {
      std::string known;
      for (const PortTopic topic : kTopics) known += (known.empty() ? "" : ", ") + std::string(topic_name(topic));
      throw py::value_error("unknown topic '" + name + "'; known are " + known + ".");
    }
    topics |= *found;
  }
  return topics;
}

std::atomic<int> num_outside{0};
bool is_ending = false;  // under the GIL

// Gives up the GIL for its life. A thread that does so must have it back before the interpreter ends: Python ends a thread
// that asks later in the middle of our frames. Calls that take no time keep the GIL.
class Outside {
 public:
  Outside() {
    if (is_ending) return;
    num_outside.fetch_add(1);
    released_.emplace();
  }
  ~Outside() {
    if (!released_) return;
    released_.reset();
    num_outside.fetch_sub(1);
  }

 private:
  std::optional<py::gil_scoped_release> released_;
};

std::vector<std::weak_ptr<PluginPort>>& ports() {
  static auto& all = *new std::vector<std::weak_ptr<PluginPort>>;
  return all;
}

std::shared_ptr<PluginPort> make_port(double time_limit_s, const std::vector<std::string>& topics, std::size_t queue_bytes) {
  if (!std::isfinite(time_limit_s) || time_limit_s <= 0) throw py::value_error("time_limit_s must be above 0.");
  PortOptions options;
  options.time_limit_s = time_limit_s;
  options.topics = parse_topics(topics);
  options.queue_bytes = queue_bytes;
  auto port = std::make_shared<PluginPort>(options);
  auto& all = ports();
  all.erase(std::remove_if(all.begin(), all.end(), [](const auto& other) { return other.expired(); }), all.end());
  all.push_back(port);
  return port;
}

void close_ports() {
  is_ending = true;
  for (const auto& weak : ports()) {
    if (const auto port = weak.lock()) port->close();
  }
  const py::gil_scoped_release released;
  while (num_outside.load() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

py::object next(PluginPort& port, double timeout_s) {
  if (is_ending) return py::none();
  PortDelivery delivery;
  const bool is_open = [&] {
    const Outside outside;
    return port.next(timeout_s, delivery);
  }();
  if (!is_open) return py::none();
  py::list notices;
  for (auto& notice : delivery.notices) notices.append(py::cast(std::move(notice)));
  return py::make_tuple(notices, delivery.question ? py::cast(std::move(*delivery.question)) : py::none());
}

bool answer(PluginPort& port, std::uint64_t number, std::optional<std::vector<std::int32_t>> chosen,
            std::optional<std::vector<std::uint64_t>> priorities, std::int32_t budget) {
  PortAnswer out;
  out.is_default = !chosen && !priorities;
  if (chosen) out.chosen = std::move(*chosen);
  if (priorities) out.priorities = std::move(*priorities);
  out.budget = budget;
  return port.answer(number, std::move(out));
}

py::dict counts_dict(const SageCounts& counts) {
  using namespace py::literals;
  return py::dict("total"_a = counts.total, "free"_a = counts.free, "cached"_a = counts.cached, "active"_a = counts.active,
                  "max_blocks"_a = counts.max_blocks, "block_bytes"_a = counts.block_bytes);
}

// A column of a field of structures.
template <typename Row, typename Field>
auto column(const std::vector<Row>& rows, Field Row::*field) {
  py::array_t<Field> out(static_cast<py::ssize_t>(rows.size()));
  Field* const data = out.mutable_data();
  for (std::size_t i = 0; i < rows.size(); ++i) data[i] = rows[i].*field;
  return out;
}

// A numpy copy of a vector, made anew at each read.
template <typename Owner, typename T>
auto array_of(std::vector<T> Owner::*member) {
  return [member](const Owner& own) { return to_array(own.*member); };
}

template <typename Field>
auto sequence_column(Field PortSequence::*field) {
  return [field](const PortQuestion& question) { return column(question.sequences, field); };
}

template <typename Field>
auto request_column(Field SageRequest::*field) {
  return [field](const PortQuestion& question) { return column(question.requests, field); };
}

void bind_question(py::module_& module) {
  py::class_<PortQuestion>(module, "PortQuestion")
      .def_readonly("number", &PortQuestion::number)
      .def_property_readonly("topic", [](const PortQuestion& question) { return topic_name(question.topic); })
      .def_readonly("engine", &PortQuestion::engine)
      .def_readonly("group", &PortQuestion::group)
      .def_readonly("block_len", &PortQuestion::block_len)
      .def_readonly("count", &PortQuestion::count)
      .def_property_readonly("ids", array_of(&PortQuestion::ids))
      .def_property_readonly("parents", array_of(&PortQuestion::parents))
      .def_property_readonly("depths", array_of(&PortQuestion::depths))
      .def_property_readonly("timestamps", array_of(&PortQuestion::timestamps))
      .def_property_readonly("counts",
                             [](const PortQuestion& question) -> py::object {
                               if (!question.counts) return py::none();
                               return counts_dict(*question.counts);
                             })
      .def_property_readonly("step", [](const PortQuestion& question) { return question.step.step; })
      .def_property_readonly("default_budget", [](const PortQuestion& question) { return question.step.default_budget; })
      .def_property_readonly("max_budget", [](const PortQuestion& question) { return question.step.max_budget; })
      .def_property_readonly("free_blocks", [](const PortQuestion& question) { return question.step.free_blocks; })
      .def_property_readonly("cached_blocks", [](const PortQuestion& question) { return question.step.cached_blocks; })
      .def_property_readonly("active_blocks", [](const PortQuestion& question) { return question.step.active_blocks; })
      .def_property_readonly("seq_ids", sequence_column(&PortSequence::seq_id))
      .def_property_readonly("priorities", sequence_column(&PortSequence::priority))
      .def_property_readonly("statuses", sequence_column(&PortSequence::status))
      .def_property_readonly("context_lens", sequence_column(&PortSequence::context_len))
      .def_property_readonly("cache_lens", sequence_column(&PortSequence::cache_len))
      .def_property_readonly("num_blocks", sequence_column(&PortSequence::num_blocks))
      .def_property_readonly("num_prompts", sequence_column(&PortSequence::num_prompt))
      .def_readonly("max_admitted", &PortQuestion::max_admitted)
      .def_property_readonly("request_ids", request_column(&SageRequest::seq_id))
      .def_property_readonly("request_tokens", request_column(&SageRequest::n_tokens))
      .def_property_readonly("request_new_tokens", request_column(&SageRequest::max_new_tokens));
}

void bind_notice(py::module_& module) {
  py::class_<PortNotice>(module, "PortNotice")
      .def_property_readonly("topic", [](const PortNotice& notice) { return topic_name(notice.topic); })
      .def_readonly("time_ns", &PortNotice::time_ns)
      .def_readonly("engine", &PortNotice::engine)
      .def_readonly("group", &PortNotice::group)
      .def_readonly("seq_id", &PortNotice::seq_id)
      .def_readonly("num_tokens", &PortNotice::num_tokens)
      .def_readonly("num_blocks", &PortNotice::num_blocks)
      .def_readonly("first_token", &PortNotice::first_token)
      .def_readonly("kind", &PortNotice::kind)
      .def_property_readonly("ids", array_of(&PortNotice::ids))
      .def_property_readonly("tokens", array_of(&PortNotice::tokens))
      .def_property_readonly("step", [](const PortNotice& notice) { return notice.result.step; })
      .def_property_readonly("step_sequences", [](const PortNotice& notice) { return notice.result.n_sequences; })
      .def_property_readonly("step_tokens", [](const PortNotice& notice) { return notice.result.n_tokens; })
      .def_property_readonly("step_finished", [](const PortNotice& notice) { return notice.result.n_finished; })
      .def_property_readonly("comm_op", [](const PortNotice& notice) { return notice.comm.op; })
      .def_property_readonly("comm_bytes", [](const PortNotice& notice) { return notice.comm.bytes; })
      .def_property_readonly("comm_rank", [](const PortNotice& notice) { return notice.comm.rank; })
      .def_property_readonly("comm_ranks", [](const PortNotice& notice) { return notice.comm.n_ranks; })
      .def_readonly("milliseconds", &PortNotice::milliseconds);
}

void bind_port(py::module_& module) {
  using namespace py::literals;
  py::class_<PluginPort, std::shared_ptr<PluginPort>>(module, "PluginPort")
      .def(py::init(&make_port), "time_limit_s"_a, "topics"_a, "queue_bytes"_a = PortOptions{}.queue_bytes)
      .def("next", &next, "timeout_s"_a)
      .def("answer", &answer, "number"_a, py::kw_only(), "chosen"_a = py::none(), "priorities"_a = py::none(), "budget"_a = 0)
      .def("fail", &PluginPort::fail, "hook"_a, "kind"_a, "detail"_a)
      .def(
          "leave",
          [](PluginPort& port, const std::vector<std::string>& topics) { port.leave(parse_topics(topics)); }, "topics"_a)
      .def("close", &PluginPort::close)
      .def_property_readonly("is_closed", &PluginPort::is_closed)
      .def_property_readonly("topics",
                             [](const PluginPort& port) {
                               py::list names;
                               for (const PortTopic topic : kTopics) {
                                 if (port.topics() & topic) names.append(topic_name(topic));
                               }
                               return py::tuple(names);
                             })
      .def_property_readonly("fault",
                             [](const PluginPort& port) -> py::object {
                               const auto fault = port.fault();
                               if (!fault) return py::none();
                               return py::make_tuple(fault->hook, fault->kind, fault->detail);
                             })
      .def("stats", [](const PluginPort& port) {
        const PortStats stats = port.stats();
        return py::dict("asked"_a = stats.asked, "answered"_a = stats.answered, "late"_a = stats.late,
                        "told"_a = stats.told, "lost"_a = stats.lost);
      });
}

void bind_table(py::module_& module) {
  using namespace py::literals;
  const auto make = [](std::shared_ptr<PluginPort> port, bool prefix, bool victims, bool schedule, bool admit,
                       bool step_end, bool comm, bool time_comm) {
    HookTableOptions options;
    options.prefix = prefix;
    options.victims = victims;
    options.schedule = schedule;
    options.admit = admit;
    options.step_end = step_end;
    options.comm = comm;
    options.time_comm = time_comm;
    return &HookTable::make(options, std::move(port));
  };
  py::class_<HookTable, std::unique_ptr<HookTable, py::nodelete>>(module, "HookTable")
      .def(py::init(make), "port"_a = nullptr, py::kw_only(), "prefix"_a = true, "victims"_a = true, "schedule"_a = false,
           "admit"_a = false, "step_end"_a = false, "comm"_a = false, "time_comm"_a = false)
      .def("capsule", [](const HookTable& table) { return py::capsule(table.hooks(), SAGE_HOOKS_CAPSULE); })
      .def("stats", [](const HookTable& table) {
        HookTableStats stats;
        {
          // An engine's thread may hold what this waits for while it waits for a plug-in, which needs the GIL.
          const Outside outside;
          stats = table.stats();
        }
        return py::dict("lookups"_a = stats.lookups, "hits"_a = stats.hits, "query_tokens"_a = stats.query_tokens,
                        "hit_tokens"_a = stats.hit_tokens, "stored_blocks"_a = stats.stored_blocks,
                        "evicted_blocks"_a = stats.evicted_blocks, "decisions"_a = stats.decisions,
                        "replays"_a = stats.replays, "divergences"_a = stats.divergences, "refused"_a = stats.refused,
                        "replicas"_a = stats.replicas, "cached_blocks"_a = stats.cached_blocks);
      });
}

}  // namespace

void bind_turbomind(py::module_& module) {
  module.attr("HOOKS_ABI") = SAGE_HOOKS_ABI;
  module.attr("HOOKS_CAPSULE") = SAGE_HOOKS_CAPSULE;
  bind_question(module);
  bind_notice(module);
  bind_port(module);
  bind_table(module);
  py::module_::import("atexit").attr("register")(py::cpp_function(&close_ports));
}

}  // namespace sage::python
