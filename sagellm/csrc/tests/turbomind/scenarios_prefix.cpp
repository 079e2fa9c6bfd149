// Prefix caching: what is found, and what must not be.

#include "scenarios.h"

namespace sage::host {

namespace {

int hit_tokens(Group& group, const Tokens& prompt, int num_new = 2) {
  const SeqId seq_id = group.submit(prompt, num_new);
  group.drain();
  require(group.request(seq_id).state == RequestState::kFinished, "a request did not finish");
  return group.request(seq_id).hit_tokens;
}

void shared_prefixes(const Lab& lab) {
  const Table table = lab.make_table();
  Group group(lab.engines, {}, table.hooks);
  const Tokens system = text(1, 12), first = system + text(2, 5);
  require(hit_tokens(group, first, 6) == 0, "a hit in an empty cache");
  require(hit_tokens(group, system + text(3, 5)) == 12, "the shared prefix was not found");
  require(hit_tokens(group, first) == 16, "the whole prompt but its last token was not found");
  require(hit_tokens(group, system) == 8, "a prompt that is a prefix was not found, but for its last block");
  // 22 of its 23 tokens are computed, which are five blocks.
  require(hit_tokens(group, Group::continued(first, 6) + text(4, 9)) == 20, "what was generated was not found");
  require(hit_tokens(group, text(2, 5) + system) == 0, "a hit of something else");
  const SeqId one = group.submit(text(5, 20), 3), other = group.submit(text(5, 20), 3);
  group.drain();
  require(group.request(one).hit_tokens + group.request(other).hit_tokens <= 16, "two prompts that begin together");
}

void uncomputed_blocks_are_not_found(const Lab& lab) {
  const Table table = lab.make_table();
  GroupOptions options;
  options.budget = 8;
  Group group(lab.engines, options, table.hooks);
  const Tokens prompt = text(1, 40);
  const SeqId first = group.submit(prompt, 4);
  group.step();
  require(group.num_tokens() == 8, "the prompt was not cut");
  const SeqId second = group.submit(prompt, 4);
  group.step();
  require(group.request(second).hit_tokens == 8, said("8 tokens are computed, found were", group.request(second).hit_tokens));
  group.drain();
  require(group.request(first).num_steps > 5 && group.request(second).state == RequestState::kFinished, "not in chunks");
  require(hit_tokens(group, prompt) == 36, "a prompt that was computed in chunks was not found");
}

void tiny_prompts(const Lab& lab) {
  const Table table = lab.make_table();
  for (const int num_new : {1, 2, 5}) {
    Group group(lab.engines, {}, table.hooks);
    for (int n = 1; n <= 9; ++n) {
      const int once = hit_tokens(group, text(n, n), num_new), twice = hit_tokens(group, text(n, n), num_new);
      require(once == 0 && twice == (n - 1) / 4 * 4, said("a prompt of some tokens, found in it:", n, twice));
    }
    group.sleep();
  }
}

void no_prefix_caching(const Lab& lab) {
  const Table table = lab.make_table();
  GroupOptions options;
  options.engine.prefix_caching = false;
  options.engine.num_blocks = 16;
  Group group(lab.engines, options, table.hooks);
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 6; ++i) group.submit(text(i, 10 + i), 12);
    group.step();
    group.cancel(100 + static_cast<SeqId>(round) * 6);
    group.drain();
  }
  group.step();  // carries out what the last ones gave up
  // Blocks after a victim of a preempted sequence may still be cached; none is active.
  int num_free = 0;
  for (const SageBlockInfo& info : group.blocks()) {
    require(info.state != SAGE_BLOCK_ACTIVE, "a block is kept for nobody");
    num_free += info.state == SAGE_BLOCK_FREE ? 1 : 0;
  }
  require(num_free >= 8, said("blocks ought to be free at once:", num_free));
  require(group.tally().lookups + group.tally().stores == 0, "the prefix cache was asked or told although it is off");
}

}  // namespace

std::vector<Scenario> prefix_scenarios() {
  return {{"shared-prefixes", shared_prefixes},
          {"uncomputed-blocks", uncomputed_blocks_are_not_found},
          {"tiny-prompts", tiny_prompts},
          {"no-prefix-caching", no_prefix_caching}};
}

}  // namespace sage::host
