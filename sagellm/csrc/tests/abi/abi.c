/* sage_hooks.h is plain C99, and is laid out as it was. */
#include "sage_hooks.h"

#define JOIN(a, b) a##b
#define NAMED(line) JOIN(check_, line)
#define CHECK(condition) typedef char NAMED(__LINE__)[(condition) ? 1 : -1];
#define SIZE(type, bytes) CHECK(sizeof(type) == (bytes))
#define AT(type, field, bytes) CHECK(offsetof(type, field) == (bytes))
#define VALUE(name, value) CHECK((name) == (value))
#include "layout.h"

/* Of one table, filled in C. */
static int32_t leave_it(void* ctx, const SageStep* step, const SageSequence* sequences, int32_t n, uint64_t* priorities,
                        int32_t* budget) {
  (void)ctx, (void)step, (void)sequences, (void)n, (void)priorities, (void)budget;
  return 1;
}

const SageHooks* hooks_in_c(void);
const SageHooks* hooks_in_c(void) {
  static const SageHooks hooks = {.abi = SAGE_HOOKS_ABI, .struct_size = sizeof(SageHooks), .schedule = leave_it};
  return &hooks;
}
