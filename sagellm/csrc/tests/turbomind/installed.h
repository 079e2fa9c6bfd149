// Reading a table, which may be older and shorter or newer and longer than the one this was compiled with.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>

#include "sage_hooks.h"

namespace sage::host {

// A copy, with zero for what the table is too old to have; all zero without a table.
inline SageHooks read_table(const SageHooks* table) {
  SageHooks copy{};
  if (table == nullptr) return copy;
  std::memcpy(&copy, table, std::min<std::size_t>(table->struct_size, sizeof copy));
  copy.struct_size = sizeof copy;
  return copy;
}

// Which table engines are made with from now on.
class Installed {
 public:
  // Why it was refused; nothing if it was not. Null removes what is installed.
  std::string install(const SageHooks* table) {
    if (table != nullptr && table->abi != SAGE_HOOKS_ABI) {
      return "the table has ABI " + std::to_string(table->abi) + ", this engine has " + std::to_string(SAGE_HOOKS_ABI);
    }
    if (table != nullptr && table->struct_size < offsetof(SageHooks, evict)) return "the table is too short to be one";
    table_ = read_table(table);
    any_ = table != nullptr;
    return {};
  }
  const SageHooks* table() const { return any_ ? &table_ : nullptr; }

 private:
  SageHooks table_{};
  bool any_ = false;
};

}  // namespace sage::host
