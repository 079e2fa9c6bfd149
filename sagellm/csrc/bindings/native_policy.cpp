// NativePolicy: the contract of sagellm/kv_policy/base.py. It asks the context which request holds which block.

#include <cmath>

#include "policy_arguments.h"
#include "../src/policies/key_map.h"

namespace sage::python {

namespace {

constexpr std::uint64_t kMaxDepth = (std::uint64_t{1} << 31) - 1;

[[noreturn]] void refuse(const py::handle& got, const char* what, const char* wanted) {
  PyErr_Clear();
  throw PolicyError(std::string(what) + " " + py::repr(got).cast<std::string>() + "; it must be " + wanted + ".");
}

std::uint64_t as_key(const py::handle& argument, const char* what) {
  constexpr const char* kWanted = "a whole number from 0 to 2**64 - 1";
  const py::object number = py::reinterpret_steal<py::object>(PyNumber_Index(argument.ptr()));
  if (!number) refuse(argument, what, kWanted);
  const std::uint64_t key = PyLong_AsUnsignedLongLong(number.ptr());
  if (PyErr_Occurred() != nullptr) refuse(argument, what, kWanted);
  return key;
}

double as_number(const py::handle& argument, const char* what) {
  const double number = PyFloat_AsDouble(argument.ptr());
  if (PyErr_Occurred() != nullptr || !std::isfinite(number)) refuse(argument, what, "a finite number");
  return number;
}

class NativePolicy final : public Books {
 public:
  NativePolicy(const std::string& name, std::int64_t capacity, const py::object& options)
      : policy_(make_policy(name, capacity, parse_options(options), *this)) {}

  void on_insert(const py::object& block) {
    require_idle();
    // Reading may fail or run code of others, so it comes before anything is changed.
    const std::uint64_t key = as_key(block.attr("key"), "key");
    const py::object parent = block.attr("parent");
    const bool has_parent = !parent.is_none();
    const std::uint64_t above = has_parent ? as_key(parent, "parent") : 0;
    if (has_parent && above == key) throw PolicyError("block " + std::to_string(key) + " is its own parent.");
    BlockFacts facts;
    facts.depth = as_key(block.attr("depth"), "depth");
    if (facts.depth < 1 || facts.depth > kMaxDepth) {
      throw PolicyError("block " + std::to_string(key) + ": depth " + std::to_string(facts.depth) + "; allowed are 1 to " +
                        std::to_string(kMaxDepth) + ".");
    }
    facts.size_bytes = as_number(block.attr("size_bytes"), "size_bytes");
    facts.cost_s = as_number(block.attr("cost_s"), "cost_s");
    require_idle();
    Slot slot = map_.find(key);
    if (slot != kNoSlot && policy_->is_resident(slot)) {
      throw PolicyError("block " + std::to_string(key) + " is on the tier already; tell on_remove before on_insert.");
    }
    const bool is_new = slot == kNoSlot;
    if (is_new) slot = add(key);
    Block& own = blocks_[slot];
    own.has_parent = has_parent;
    own.parent = above;
    try {
      policy_->insert(slot, key, facts, true);
    } catch (...) {
      if (is_new) forget(slot);
      throw;
    }
  }

  void on_hit(const py::object& block, const py::object&) {
    const std::uint64_t key = as_key(block, "key");
    require_idle();
    policy_->hit(resident(key));
  }

  void on_remove(const py::object& block, bool evicted) {
    const std::uint64_t key = as_key(block, "key");
    require_idle();
    const Slot slot = resident(key);
    if (policy_->remove(slot, evicted)) forget(slot);
  }

  py::object select_victims(const py::object& context) {
    require_idle();
    ++question_;
    context_ = context;
    try {
      select();
    } catch (...) {
      end_question();
      throw;
    }
    end_question();
    return context.attr("decision")();
  }

  // Until a context says otherwise, whatever is on the tier may go.
  bool confirm(Slot slot) override {
    Block& own = blocks_[slot];
    if (!context_ || own.confirmed == question_) return true;
    if (is_true(context_.attr("is_evictable")(own.key))) {
      own.confirmed = question_;
      return true;
    }
    set_aside_.push_back(slot);
    return false;
  }

  Slot resident_parent(Slot slot) override {
    const Block& own = blocks_[slot];
    const Slot parent = own.has_parent ? map_.find(own.parent) : kNoSlot;
    return parent != kNoSlot && policy_->is_resident(parent) ? parent : kNoSlot;
  }

  void forget(Slot slot) override {
    map_.erase(blocks_[slot].key);
    free_.push_back(slot);
  }

 private:
  struct Block {
    std::uint64_t key = 0, parent = 0, confirmed = 0;  // the last: the question in which it was found evictable
    bool has_parent = false;
  };

  // The policy is in the midst of its own work while a context is asked, and must not be told or asked anything else.
  void require_idle() const {
    if (!context_) return;
    throw PolicyError("this policy has a question open; tell it events and ask it again once select_victims has returned.");
  }

  static bool is_true(const py::object& answer) {
    const int truth = PyObject_IsTrue(answer.ptr());
    if (truth < 0) throw py::error_already_set();
    return truth != 0;
  }

  Slot add(std::uint64_t key) {
    Slot slot;
    if (free_.empty()) {
      slot = static_cast<Slot>(blocks_.size());
      blocks_.emplace_back();
    } else {
      slot = free_.back();
      free_.pop_back();
    }
    blocks_[slot].key = key;
    map_.insert(key, slot);
    return slot;
  }

  Slot resident(std::uint64_t key) const {
    const Slot slot = map_.find(key);
    if (slot != kNoSlot && policy_->is_resident(slot)) return slot;
    throw PolicyError("block " + std::to_string(key) + " is not on the tier; tell on_insert first.");
  }

  void select() {
    const py::sequence incoming(context_.attr("incoming"));
    const std::size_t num_incoming = py::len(incoming);
    const auto count = context_.attr("missing").cast<std::int64_t>();
    for (std::int64_t i = 0; i < count; ++i) {
      Slot coming = kNoSlot;
      if (static_cast<std::size_t>(i) < num_incoming) {
        coming = map_.find(as_key(incoming[static_cast<std::size_t>(i)], "incoming key"));
        if (coming != kNoSlot) policy_->notice(coming);
      }
      const Slot victim = policy_->choose(coming);
      if (victim == kNoSlot) return;
      const py::object freed = context_.attr("take")(blocks_[victim].key, policy_->reason(victim));
      set_aside_.push_back(victim);
      policy_->set_evictable(victim, false);
      if (freed.is_none()) continue;
      const Slot parent = map_.find(as_key(freed, "parent"));
      if (parent == kNoSlot || !policy_->is_resident(parent)) continue;
      blocks_[parent].confirmed = question_;
      policy_->set_evictable(parent, true);
    }
  }

  void end_question() {
    context_ = py::object();
    for (const Slot slot : set_aside_) policy_->set_evictable(slot, true);
    set_aside_.clear();
  }

  KeyMap map_;
  std::vector<Block> blocks_;
  std::vector<Slot> free_, set_aside_;
  py::object context_;
  std::uint64_t question_ = 0;
  std::unique_ptr<Policy> policy_;  // last: it calls back
};

}  // namespace

void bind_native_policy(py::module_& module) {
  py::class_<NativePolicy>(module, "NativePolicy")
      .def(py::init<const std::string&, std::int64_t, const py::object&>(), py::arg("name"), py::arg("capacity"),
           py::arg("options") = py::none())
      .def("on_insert", &NativePolicy::on_insert, py::arg("block"))
      .def("on_hit", &NativePolicy::on_hit, py::arg("key"), py::arg("time_s") = py::none())
      .def("on_remove", &NativePolicy::on_remove, py::arg("key"), py::arg("evicted") = true)
      .def("select_victims", &NativePolicy::select_victims, py::arg("context"));
}

}  // namespace sage::python
