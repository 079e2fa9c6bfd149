// Results of the index, as Python gets them.

#include "prefix_results.h"

#include <pybind11/stl.h>

namespace sage::python {

void bind_prefix_results(py::module_& module) {
  py::class_<PyRemoval>(module, "PrefixRemoval")
      .def(py::init([](py::handle kv_block_ids, const std::vector<std::int8_t>& tiers) {
             PyRemoval out;
             const Int32View ids(kv_block_ids, "block ids");
             out.removal.blocks.assign(ids.data(), ids.data() + ids.size());
             for (const std::int8_t tier : tiers) out.removal.tiers.push_back(static_cast<Tier>(tier));
             return out;
           }),
           py::arg("kv_block_ids"), py::arg("tiers"))
      .def_property_readonly("kv_block_ids",
                             [](py::handle self) {
                               const auto& blocks = self.cast<const PyRemoval&>().removal.blocks;
                               return view_array(blocks.data(), blocks.size(), self);
                             })
      .def_property_readonly("tiers",
                             [](const PyRemoval& out) { return tier_array(out.removal.tiers, out.removal.blocks.size()); })
      .def(
          "on",
          [](const PyRemoval& out, py::handle tier) {
            const Tier wanted = parse_tier(tier);
            std::vector<BlockId> ids;
            for (std::size_t i = 0; i < out.removal.blocks.size(); ++i) {
              if (out.removal.tiers[i] == wanted) ids.push_back(out.removal.blocks[i]);
            }
            return to_array(ids);
          },
          py::arg("tier"))
      .def("__len__", [](const PyRemoval& out) { return out.removal.blocks.size(); })
      .def("__repr__", [](const PyRemoval& out) {
        return "PrefixRemoval(" + std::to_string(out.removal.blocks.size()) + " blocks)";
      });

  py::class_<PyEntry>(module, "PrefixEntry")
      .def(py::init([](EntryId entry_id, std::uint64_t token_hash, std::size_t token_length, py::handle kv_block_ids,
                       const std::vector<std::int8_t>& tiers, py::object metadata, std::size_t num_new_blocks,
                       py::object replaced) {
             PyEntry out;
             out.entry.id = entry_id;
             out.entry.token_hash = token_hash;
             out.token_length = token_length;
             const Int32View ids(kv_block_ids, "block ids");
             out.entry.path.blocks.assign(ids.data(), ids.data() + ids.size());
             for (const std::int8_t tier : tiers) out.entry.path.tiers.push_back(static_cast<Tier>(tier));
             out.entry.metadata = dump_metadata(metadata);
             out.entry.num_new_blocks = num_new_blocks;
             if (!replaced.is_none()) out.entry.replaced = replaced.cast<const PyRemoval&>().removal;
             return out;
           }),
           py::kw_only(), py::arg("entry_id"), py::arg("token_hash"), py::arg("token_length"), py::arg("kv_block_ids"),
           py::arg("tiers"), py::arg("metadata") = py::none(), py::arg("num_new_blocks") = 0,
           py::arg("replaced") = py::none())
      .def_property_readonly("entry_id", [](const PyEntry& out) { return out.entry.id; })
      .def_property_readonly("token_hash", [](const PyEntry& out) { return out.entry.token_hash; })
      .def_readonly("token_length", &PyEntry::token_length)
      .def_property_readonly("kv_block_ids",
                             [](py::handle self) {
                               const auto& blocks = self.cast<const PyEntry&>().entry.path.blocks;
                               return view_array(blocks.data(), blocks.size(), self);
                             })
      .def_property_readonly("tiers",
                             [](const PyEntry& out) { return tier_array(out.entry.path.tiers, out.entry.path.blocks.size()); })
      .def_property_readonly("metadata",
                             [](const PyEntry& out) -> py::object {
                               if (out.entry.metadata.empty()) return py::none();
                               return py::module_::import("json").attr("loads")(out.entry.metadata);
                             })
      .def_property_readonly("num_new_blocks", [](const PyEntry& out) { return out.entry.num_new_blocks; })
      .def_property_readonly("replaced",
                             [](const PyEntry& out) -> py::object {
                               if (out.entry.replaced.blocks.empty()) return py::none();
                               return py::cast(PyRemoval{out.entry.replaced});
                             })
      .def("__repr__", [](const PyEntry& out) {
        return "PrefixEntry(entry_id=" + std::to_string(out.entry.id) + ", token_length=" + std::to_string(out.token_length) +
               ", num_new_blocks=" + std::to_string(out.entry.num_new_blocks) + ")";
      });
}

}  // namespace sage::python
