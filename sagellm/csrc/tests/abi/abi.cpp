// sage_hooks.h in C++: laid out as in C, and readable from there.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <type_traits>

#include "sage_hooks.h"

#define SIZE(type, bytes) static_assert(sizeof(type) == (bytes), #type);
#define AT(type, field, bytes) static_assert(offsetof(type, field) == (bytes), #type "." #field);
#define VALUE(name, value) static_assert((name) == (value), #name);
#include "layout.h"

static_assert(std::is_standard_layout_v<SageHooks> && std::is_trivially_copyable_v<SageHooks>);
static_assert(SAGE_PRIORITY_HOLD == ~std::uint64_t{0});

extern "C" const SageHooks* hooks_in_c(void);

int main() {
  const SageHooks* const hooks = hooks_in_c();
  if (hooks->abi != SAGE_HOOKS_ABI || hooks->struct_size != sizeof(SageHooks) || hooks->evict != nullptr ||
      hooks->schedule(hooks->ctx, nullptr, nullptr, 0, nullptr, nullptr) != 1) {
    std::puts("a table that was filled in C is read otherwise");
    return 1;
  }
  std::puts("abi: passed");
  return 0;
}
