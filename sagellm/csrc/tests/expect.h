// How a native test says what went wrong, and goes wrong on purpose.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>

// Whether SAGELLM_NATIVE_FAULT asks for this fault, to see that the sanitizer reports it.
inline bool planted(const char* fault) {
  const char* const wanted = std::getenv("SAGELLM_NATIVE_FAULT");
  return wanted != nullptr && std::strcmp(wanted, fault) == 0;
}

#define EXPECT(condition)                                                           \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                 \
    }                                                                               \
  } while (false)

#define EXPECT_ERROR(expected_kind, call)                                                \
  do {                                                                                   \
    bool refused = false;                                                                \
    try {                                                                                \
      call;                                                                              \
    } catch (const sage::Error& error) {                                                 \
      EXPECT(error.kind() == sage::ErrorKind::expected_kind && error.what()[0] != '\0'); \
      refused = true;                                                                    \
    }                                                                                    \
    if (!refused) {                                                                      \
      std::fprintf(stderr, "%s:%d: not refused: %s\n", __FILE__, __LINE__, #call);       \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)
