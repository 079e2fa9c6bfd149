#include "attention_plan.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

#include "product.h"

namespace sage::cpu {

namespace {

constexpr int kGroupRows = 96;  // of sequences that share keys
constexpr int kGroupSplits = 4;  // of keys that many of these rows read in a run

// Depths and paths of new tokens, if they are no chain.
void read_tree(const std::int64_t* parents, Sequence* one) {
  const int tokens = one->tokens;
  bool is_chain = true;
  for (int i = 0; i < tokens; ++i) {
    const bool has_parent = i > 0 && parents[i] >= 0 && parents[i] < i;
    if (!has_parent && !(i == 0 && parents[i] == -1)) throw std::invalid_argument("a token of a tree comes after its parent");
    is_chain = is_chain && parents[i] == i - 1;
  }
  if (is_chain) return;
  one->depths.assign(size(tokens), 0);
  one->paths.assign(size(tokens) * size(tokens), 0);
  for (int i = 1; i < tokens; ++i) {
    const int parent = static_cast<int>(parents[i]), depth = one->depths[size(parent)] + 1;
    one->depths[size(i)] = depth;
    std::copy_n(one->paths.begin() + parent * tokens, depth, one->paths.begin() + i * tokens);
    one->paths[size(i * tokens + depth)] = i;
  }
}

std::vector<Sequence> read_sequences(const PagedCache& cache, const DecoderStep& step) {
  const auto fail = [](const std::string& words) { throw std::invalid_argument(words); };
  std::vector<Sequence> found;
  int row = 0;
  for (int s = 0; s < step.num_sequences; ++s) {
    const std::int64_t tokens = step.query_lengths[s], length = step.lengths[s];
    if (tokens < 1 || tokens > step.num_tokens - row) fail("query lengths do not add up to the step's tokens");
    if (length != 0 && length < tokens) fail("a sequence is shorter than its new tokens");
    Sequence one{row, static_cast<int>(tokens), static_cast<int>(length), length > 0, {}, static_cast<int>(length)};
    const std::int64_t blocks = (length + cache.block_size - 1) / cache.block_size;
    if (step.sparse != nullptr) {
      const int keep = step.sparse->keep[size(s)];
      if (tokens != 1 || keep < 1) fail("a sequence that reads some of its blocks has one new token, and reads a block");
      if (keep < blocks) one.seen = (keep - 1) * cache.block_size + (one.length - 1) % cache.block_size + 1;
    }
    if (blocks > step.table_width) fail("a sequence has more tokens than its blocks hold");
    const std::int64_t* table = step.tables + size(s) * size(step.table_width);
    one.table.assign(table, table + blocks);
    for (const std::int64_t block : one.table) {
      if (block < 0 || block >= cache.num_blocks) fail("a block is outside of the cache");
    }
    if (step.parents != nullptr && one.has_cache) read_tree(step.parents + row, &one);
    row += one.tokens;
    found.push_back(std::move(one));
  }
  if (row != step.num_tokens) fail("query lengths do not add up to the step's tokens");
  return found;
}

// Tokens of whole blocks that two sequences have in common.
int common_tokens(const Sequence& one, const Sequence& other, int block_size) {
  const int blocks = (std::min(one.seen, other.seen) - 1) / block_size;
  int same = 0;
  while (same < blocks && one.table[size(same)] == other.table[size(same)]) ++same;
  return same * block_size;
}

// Puts sequences that begin with the same blocks into groups, which read at least a split together.
void group_sequences(const PagedCache& cache, int share, const AttentionCosts* costs, AttentionPlan* plan) {
  std::vector<bool> is_placed(plan->sequences.size(), false);
  const Size most = size(std::max(1, kGroupRows / share));
  for (Size s = 0; s < plan->sequences.size(); ++s) {
    const Sequence& one = plan->sequences[s];
    if (is_placed[s] || one.tokens != 1) continue;
    std::vector<int> group{static_cast<int>(s)};
    int common = one.seen;
    for (Size other = s + 1; other < plan->sequences.size() && group.size() < most; ++other) {
      if (is_placed[other] || plan->sequences[other].tokens != 1) continue;
      const int found = common_tokens(one, plan->sequences[other], cache.block_size);
      // A member with little in common would make the others read the rest each for themselves.
      if (found < kSplit || (group.size() > 1 && found < common)) continue;
      common = std::min(common, found);
      group.push_back(static_cast<int>(other));
    }
    const int members = static_cast<int>(group.size());
    if (members < 2 || (costs != nullptr && costs->seconds(members) > members * costs->seconds(1))) continue;
    // Few rows read their splits as sequences alone do. Many take longer runs: the next keys arrive while they compute.
    const int run = members * share <= kFewRows ? kSplit : kGroupSplits * kSplit;
    for (const int member : group) {
      is_placed[size(member)] = true;
      plan->sequences[size(member)].common = common;
      plan->sequences[size(member)].num_splits = divided(common, run);
    }
    plan->groups.push_back({std::move(group), run});
  }
}

}  // namespace

AttentionCosts::AttentionCosts(const Kernels& products, const DecoderShape& shape, const PagedCache& cache)
    : format_(cache.format), dtype_(cache.dtype) {
  const Kernels& kernels = kernels_of_cache(products, type_of_cache(cache, products));
  const int share = shape.heads / shape.kv_heads;
  const int keys = std::min(kSplit, cache.num_blocks * cache.block_size) / kKeyGroup * kKeyGroup;
  few_.last = std::max(1, kFewRows / share);
  many_.first = few_.last + 1;
  many_.last = std::max(many_.first, kGroupRows / share);
  const auto measure = [&](int members) {
    const int rows = members * share;
    std::vector<std::int64_t> table(size(divided(keys, cache.block_size)));
    std::iota(table.begin(), table.end(), 0);
    std::vector<float> queries(size(rows * shape.head_size), 0.F), out(size(rows * (shape.head_size + 2)));
    std::vector<char> scratch(kernels.attend_bytes(rows, 1, shape.head_size, true) + 64);
    Attend task{};
    task.heads = 1;
    task.query = queries.data();
    task.query_stride = size(share * shape.head_size);
    task.tokens = members;
    task.share = share;
    task.head_size = shape.head_size;
    task.keys = cache.keys[0];
    task.values = cache.values[0];
    task.block_stride = cache.block_stride;
    task.slot_stride = cache.slot_stride;
    task.format = cache.format;
    if (cache.format != Format::kPlain) {
      task.key_scales = cache.key_scales[0];
      task.value_scales = cache.value_scales[0];
      task.scale_block_stride = cache.scale_block_stride;
      task.scale_slot_stride = cache.scale_slot_stride;
    }
    task.table = table.data();
    while ((1 << task.block_shift) < cache.block_size) ++task.block_shift;
    task.first_position = task.end = keys;
    task.few = true;
    task.scale = shape.attention_scale;
    task.softcap = shape.softcap;
    char* aligned = scratch.data() + (64 - reinterpret_cast<std::uintptr_t>(scratch.data()) % 64) % 64;
    double least = std::numeric_limits<double>::infinity();
    for (int round = 0; round < 12; ++round) {  // the first ones bring the keys into the cache of the processor
      const auto start = std::chrono::steady_clock::now();
      kernels.attend(task, out.data(), out.data() + rows * shape.head_size, out.data() + rows * (shape.head_size + 1), aligned);
      least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return least;
  };
  for (Line* line : {&few_, &many_}) {
    line->at_first = measure(line->first);
    line->at_last = measure(line->last);
  }
}

double AttentionCosts::Line::at(int members) const {
  return first == last ? at_first : at_first + (at_last - at_first) * (members - first) / (last - first);
}

double AttentionCosts::seconds(int members) const { return members <= few_.last ? few_.at(members) : many_.at(members); }

AttentionPlan plan_attention(const PagedCache& cache, const DecoderStep& step, const DecoderShape& shape,
                             const AttentionCosts* costs, int threads, int half) {
  AttentionPlan plan;
  if (step.sparse != nullptr && (!step.is_decoding || step.sparse->keep.size() != size(step.num_sequences))) {
    throw std::invalid_argument("a step that reads some blocks decodes, and says for each sequence how many it reads");
  }
  plan.sequences = read_sequences(cache, step);
  const int share = shape.heads / shape.kv_heads;
  // The heads of a token lie side by side: a task that reads them all reads memory in one run. Where there are few tasks
  // each takes one head, so that all threads have some.
  int splits = 0;
  for (const Sequence& one : plan.sequences) splits += divided(one.seen, kSplit);
  const bool by_head = step.sparse != nullptr && step.sparse->by_head;
  const int heads = step.is_decoding && splits >= threads && !by_head ? shape.kv_heads : 1;
  plan.heads_together = heads;
  if (step.sharing != Sharing::kNever && step.is_decoding && step.sparse == nullptr) {
    group_sequences(cache, share, step.sharing == Sharing::kAlways ? nullptr : costs, &plan);
  }
  const std::int64_t of_head = share * (shape.head_size + 2);
  // The longest tasks come first, so that threads end together.
  for (int g = 0; g < static_cast<int>(plan.groups.size()); ++g) {
    const AttentionPlan::Group& group = plan.groups[size(g)];
    const int common = plan.sequences[size(group.members[0])].common;
    for (int begin = 0; begin < common; begin += group.run) {
      for (int head = 0; head < shape.kv_heads; head += heads) {
        const int end = std::min(begin + group.run, common);
        plan.tasks.push_back({group.members[0], head, heads, 0, static_cast<int>(group.members.size()), begin, end,
                              begin / group.run * of_head, g});
      }
    }
  }
  int tiles = 0;
  for (int s = 0; s < static_cast<int>(plan.sequences.size()); ++s) {
    Sequence& one = plan.sequences[size(s)];
    plan.owners.insert(plan.owners.end(), size(one.tokens), s);
    if (!one.has_cache) {
      plan.partials.insert(plan.partials.end(), size(shape.kv_heads / heads), -1);
      continue;
    }
    // The size depends on what the step does, not on how many tokens there are. So a token that is decoded gets the same
    // numbers alone and as a guess beside others. A token of a prompt gets the same whatever part of it was cached.
    const int most = std::max(1, step.is_decoding ? kFewRows / share : prompt_tile(shape));
    const int num_runs = one.num_splits;  // of its group
    one.num_splits = step.is_decoding ? num_runs + divided(one.seen - one.common, kSplit) : 0;
    for (int head = 0; head < shape.kv_heads; head += heads) {
      for (int first = 0, tokens = 0; first < one.tokens; first += tokens) {
        const int before_half = half - one.row - first;
        tokens = std::min(before_half > 0 ? std::min(most, before_half) : most, one.tokens - first);
        if (!step.is_decoding) {
          const int end = one.length - one.tokens + first + tokens;
          plan.tasks.push_back({s, head, heads, first, tokens, 0, end, -1, -1, tiles + first / most});
          continue;
        }
        const bool is_merged = one.num_splits > 1;
        const std::int64_t of_split = heads * tokens * of_head;
        if (is_merged) plan.merged.push_back({s, head, heads, first, tokens, 0, one.seen, plan.num_partials});
        if (first == 0) plan.partials.push_back(is_merged ? plan.num_partials : -1);
        for (int split = num_runs; split < one.num_splits; ++split) {
          const int begin = one.common + (split - num_runs) * kSplit, end = std::min(one.seen, begin + kSplit);
          plan.tasks.push_back({s, head, heads, first, tokens, begin, end, is_merged ? plan.num_partials + split * of_split : -1});
        }
        if (is_merged) plan.num_partials += one.num_splits * of_split;
      }
    }
    tiles += divided(one.tokens, most);
  }
  const auto in_first = [&](const AttentionTask& task) { return plan.sequences[size(task.sequence)].row + task.first < half; };
  const auto put_first = [&](std::vector<AttentionTask>* tasks) {
    return static_cast<int>(std::stable_partition(tasks->begin(), tasks->end(), in_first) - tasks->begin());
  };
  plan.first_tasks = put_first(&plan.tasks);
  plan.first_merged = put_first(&plan.merged);
  return plan;
}

}  // namespace sage::cpu
