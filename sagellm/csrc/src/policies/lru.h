// The block that was used least recently goes.
#pragma once

#include "fifo.h"

namespace sage {

template <typename Host>
class Lru : public Fifo<Host> {
 public:
  using Fifo<Host>::Fifo;

  void hit(Slot slot) { this->queue_.move_to_newest(slot); }
  std::string reason(Slot) const { return "least recently used"; }
};

}  // namespace sage
