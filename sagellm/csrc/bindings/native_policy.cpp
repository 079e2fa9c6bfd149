// NativePolicy: the contract of sagellm/kv_policy/base.py. Who holds which block it asks the context.

#include "policy_arguments.h"
#include "../src/policies/key_map.h"

namespace sage::python {

namespace {

class NativePolicy final : public Books {
 public:
  NativePolicy(const std::string& name, std::int64_t capacity, const py::object& options)
      : policy_(make_policy(name, capacity, parse_options(options), *this)) {}

  void on_insert(const py::object& block) {
    const auto key = block.attr("key").cast<std::uint64_t>();
    Slot slot = map_.find(key);
    if (slot != kNoSlot && policy_->is_resident(slot)) {
      throw PolicyError("block " + std::to_string(key) + " is on the tier already; tell on_remove before on_insert.");
    }
    if (slot == kNoSlot) slot = add(key);
    const py::object parent = block.attr("parent");
    Block& own = blocks_[slot];
    own.has_parent = !parent.is_none();
    own.parent = own.has_parent ? parent.cast<std::uint64_t>() : 0;
    BlockFacts facts;
    facts.depth = block.attr("depth").cast<std::uint64_t>();
    facts.size_bytes = block.attr("size_bytes").cast<double>();
    facts.cost_s = block.attr("cost_s").cast<double>();
    policy_->insert(slot, key, facts, true);
  }

  void on_hit(std::uint64_t key, double) { policy_->hit(resident(key)); }

  void on_remove(std::uint64_t key, bool evicted) {
    const Slot slot = resident(key);
    if (policy_->remove(slot, evicted)) forget(slot);
  }

  py::object select_victims(const py::object& context) {
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
    if (context_.attr("is_evictable")(own.key).cast<bool>()) {
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
    const auto incoming = py::reinterpret_borrow<py::sequence>(context_.attr("incoming"));
    const std::size_t num_incoming = py::len(incoming);
    const auto count = context_.attr("missing").cast<std::int64_t>();
    for (std::int64_t i = 0; i < count; ++i) {
      Slot coming = kNoSlot;
      if (static_cast<std::size_t>(i) < num_incoming) {
        coming = map_.find(incoming[static_cast<std::size_t>(i)].cast<std::uint64_t>());
        if (coming != kNoSlot) policy_->notice(coming);
      }
      const Slot victim = policy_->choose(coming);
      if (victim == kNoSlot) return;
      const py::object freed = context_.attr("take")(blocks_[victim].key, policy_->reason(victim));
      set_aside_.push_back(victim);
      policy_->set_evictable(victim, false);
      if (freed.is_none()) continue;
      const Slot parent = map_.find(freed.cast<std::uint64_t>());
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
      .def("on_hit", &NativePolicy::on_hit, py::arg("key"), py::arg("time_s") = 0.0)
      .def("on_remove", &NativePolicy::on_remove, py::arg("key"), py::arg("evicted") = true)
      .def("select_victims", &NativePolicy::select_victims, py::arg("context"));
}

}  // namespace sage::python
