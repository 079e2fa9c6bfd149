#include "attention_work.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace sage::cpu {

Type type_of_cache(const PagedCache& cache, const Kernels& kernels) {
  if (cache.format != Format::kPlain) return kernels.weights;
  return cache.dtype == Dtype::kFloat32 ? Type::kFloat32 : Type::kBFloat16;
}

namespace {

bool has_window(const std::vector<int>& windows) {
  return std::any_of(windows.begin(), windows.end(), [](int window) { return window > 0; });
}

}  // namespace

AttentionWork::AttentionWork(const PagedCache& cache, const DecoderStep& step, const DecoderShape& shape,
                             const Kernels& kernels, const AttentionCosts* costs, std::vector<int> windows, int threads,
                             int half)
    : cache_(cache),
      shape_(shape),
      products_(kernels),
      kernels_(kernels_of_cache(kernels, type_of_cache(cache, kernels))),
      element_(size_of(kernels.inputs)),
      query_element_(size_of(kernels_.inputs)),
      windows_(std::move(windows)),
      num_tokens_(step.num_tokens),
      table_width_(step.table_width),
      half_(step.sparse == nullptr && step.sparse_prompts == nullptr && step.observed == nullptr && cache.codes == nullptr
                ? half
                : 0),
      is_decoding_(step.is_decoding),
      plan_(plan_attention(cache, step, shape, costs, threads, half_)),
      bounds_(cache_, shape_),
      choice_(step.sparse, plan_, shape, step.table_width),
      whole_(choice_.num_whole() > 0 ? plan_of_all(cache, step, shape, threads) : AttentionPlan{}),
      tiles_(step.sparse_prompts, plan_, shape, cache.block_size),
      wanted_(step.observed) {
  while ((1 << block_shift_) < cache.block_size) ++block_shift_;
  if (choice_.exists()) {
    const Sparse::Weights weights = step.sparse->weights;
    const bool has_bounds = cache.bounds != nullptr;
    if ((weights == Sparse::Weights::kBounds && !has_bounds) ||
        (weights == Sparse::Weights::kSpread && !(has_bounds && cache.key_sums != nullptr)) ||
        (weights == Sparse::Weights::kCodes && !(has_bounds && cache.codes != nullptr))) {
      throw std::invalid_argument("the cache has no bounds, means or codes of keys to choose blocks by");
    }
  }
  if (cache.codes != nullptr) {
    if (cache.bounds == nullptr || shape.head_size % kCodeGroup != 0 || shape.head_size > kMaxHead ||
        cache.block_size % kCodeGroup != 0) {
      throw std::invalid_argument("codes of keys need bounds, and heads and blocks of whole 16s");
    }
    for (int s = 0; s < static_cast<int>(plan_.sequences.size()); ++s) {
      const Sequence& one = plan_.sequences[size(s)];
      if (!one.has_cache) continue;
      for (int block = (one.length - one.tokens) / cache.block_size; block < one.length / cache.block_size; ++block) {
        filled_.push_back({s, block});
      }
    }
  }
  if (tiles_.exists() && (is_decoding_ || has_window(windows_))) {
    throw std::invalid_argument("blocks of prompts are chosen in steps of prompts, in layers without a window");
  }
  if (wanted_ != nullptr) {
    if (wanted_->queries.size() != plan_.sequences.size()) {
      throw std::invalid_argument("queries are observed of another number of sequences");
    }
    for (int s = 0; s < static_cast<int>(plan_.sequences.size()); ++s) {
      const Sequence& one = plan_.sequences[size(s)];
      const int queries = wanted_->queries[size(s)];
      if (queries < 0 || queries > one.tokens) throw std::invalid_argument("more queries are observed than a step has");
      if (queries > 0 && one.has_cache) observed_.push_back(s);
    }
  }
  bounds_.begin(plan_.sequences, static_cast<int>(windows_.size()));
}

AttentionPlan AttentionWork::plan_of_all(const PagedCache& cache, DecoderStep step, const DecoderShape& shape, int threads) {
  step.sparse = nullptr;
  step.sharing = Sharing::kNever;
  return plan_attention(cache, step, shape, nullptr, threads);
}

Size AttentionWork::head_bytes() const {
  if (cache_.format == Format::kLevels4) return size(shape_.head_size) / 2;
  return size(shape_.head_size) * (cache_.format == Format::kPlain ? size_of(kernels_.weights) : 1);
}

Size AttentionWork::local_bytes() const {
  Size bytes = 0;
  for (const AttentionPlan* plan : {&plan_, &whole_}) {
    for (const AttentionTask& task : plan->tasks) {
      const int rows = task.tokens * share();
      const Size scratch = kernels_.attend_bytes(rows, task.heads, shape_.head_size, is_decoding_);
      bytes = std::max(bytes, size(task.heads) * result_bytes(rows) + gathered_query_bytes(task) + scratch);
    }
  }
  const auto weighing = [&](int queries, int count) {
    return 2 * weights_bytes() + kernels_.block_weights_bytes(queries * share(), shape_.head_size, count);
  };
  if (choice_.has_weights()) {
    bytes = std::max(bytes, weighing(1, table_width_ * (choice_.weighs_keys() ? cache_.block_size : 1)));
  }
  for (const int sequence : observed_) {
    bytes = std::max(bytes, weighing(wanted_->queries[size(sequence)], table_width_ * cache_.block_size));
  }
  if (!filled_.empty()) bytes = std::max(bytes, size(shape_.kv_heads) * bounds_.code_bytes());
  for (int t = 0; t < tiles_.count(); ++t) {
    const int strips = divided(tiles_[t].tokens, tiles_.stride());
    bytes = std::max(bytes, (tiles_.width() + 1) * 8 + weights_bytes() + 64 +
                                kernels_.strip_weights_bytes(strips * share(), tiles_.stride(), shape_.head_size,
                                                             tiles_[t].blocks * cache_.block_size / tiles_.stride()));
  }
  return bytes;
}

void AttentionWork::store(int layer, int row, const float* rotated) {
  kernels_.to_input(rotated, nullptr, head_numbers(), memory_.queries + size(row) * size(head_numbers()) * query_element_);
  const Sequence& one = plan_.sequences[size(plan_.owners[size(row)])];
  if (!one.has_cache) return;
  const int position = one.length - one.tokens + row - one.row;
  const Size block = size(static_cast<int>(one.table[size(position >> block_shift_)])),
             slot = size(position & (cache_.block_size - 1));
  const Size at = block * cache_.block_stride + slot * cache_.slot_stride;
  const float* keys = rotated + head_numbers();
  bounds_.add(layer, one.table[size(position >> block_shift_)], keys);
  if (cache_.format == Format::kPlain) {
    kernels_.to_weight(keys, key_numbers(), cache_.keys[size(layer)] + at);
    kernels_.to_weight(keys + key_numbers(), key_numbers(), cache_.values[size(layer)] + at);
    return;
  }
  const Size of_scales = block * cache_.scale_block_stride + slot * cache_.scale_slot_stride;
  const int of_group = has_key_groups(cache_.format) ? static_cast<int>(slot % kKeyGroup) : 0;
  const auto encode = [&](const float* from, int key_of_group, char* codes, char* scales) {
    kernels_.encode_heads(from, shape_.kv_heads, shape_.head_size, cache_.format, key_of_group, cache_.slot_stride, codes,
                          scales + of_scales);
  };
  encode(keys, has_key_groups(cache_.format) ? of_group : -1,
         cache_.keys[size(layer)] + at - size(of_group) * cache_.slot_stride, cache_.key_scales[size(layer)]);
  encode(keys + key_numbers(), -1, cache_.values[size(layer)] + at, cache_.value_scales[size(layer)]);
}

// ---- attention

Attend AttentionWork::attend_of(const AttentionTask& task, int index) const {
  const Sequence& one = plan_of(index).sequences[size(task.sequence)];
  Attend wanted{};
  wanted.query_stride = size(head_numbers());
  wanted.tokens = task.tokens;
  wanted.share = share();
  wanted.head_size = shape_.head_size;
  wanted.block_stride = cache_.block_stride;
  wanted.slot_stride = cache_.slot_stride;
  wanted.table = one.seen < one.length ? choice_.table(task.sequence, task.head) : one.table.data();
  wanted.block_shift = block_shift_;
  wanted.first_position = task.group >= 0 ? task.end : one.seen - one.tokens + task.first;  // all of a group see all
  if (!one.depths.empty()) {
    wanted.depths = one.depths.data() + task.first;
    wanted.paths = one.paths.data() + size(task.first) * size(one.tokens);
    wanted.first_new = one.length - one.tokens;
    wanted.path_stride = one.tokens;
  }
  wanted.begin = task.begin;
  wanted.end = task.end;
  wanted.few = is_decoding_;
  wanted.window = windows_[size(index)];
  if (task.tile >= 0 && !tiles_.is_whole(index)) {
    const TileChoice::Table table = tiles_.table(task.tile, task.head);
    wanted.table = table.blocks;
    wanted.first_position -= table.skipped;
    wanted.end -= table.skipped;
  }
  wanted.scale = shape_.attention_scale;
  wanted.softcap = shape_.softcap;
  const int rows = task.tokens * share();
  const Size head = size(task.head) * size(shape_.head_size);
  wanted.heads = task.heads;
  wanted.result_stride = result_bytes(rows) / 4;
  wanted.query = memory_.queries +
                 (size(one.row + task.first) * size(head_numbers()) + head * size(share())) * query_element_;
  wanted.keys = cache_.keys[size(index)] + size(task.head) * head_bytes();
  wanted.values = cache_.values[size(index)] + size(task.head) * head_bytes();
  wanted.format = cache_.format;
  if (cache_.format != Format::kPlain) {
    wanted.key_scales = cache_.key_scales[size(index)] + size(task.head) * scale_bytes();
    wanted.value_scales = cache_.value_scales[size(index)] + size(task.head) * scale_bytes();
    wanted.scale_block_stride = cache_.scale_block_stride;
    wanted.scale_slot_stride = cache_.scale_slot_stride;
  }
  return wanted;
}

void AttentionWork::attend(int index, int chunk, char* local) const {
  const AttentionTask& task = plan_of(index).tasks[size(chunk)];
  Attend wanted = attend_of(task, index);
  const int rows = task.tokens * share();
  auto *results = reinterpret_cast<float*>(local), *max = results + rows * shape_.head_size;
  char* scratch = local + size(task.heads) * result_bytes(rows);
  if (task.group >= 0) {
    wanted.query = gather_queries(plan_of(index), task, scratch) +
                   size(task.head) * size(share() * shape_.head_size) * query_element_;
    scratch += gathered_query_bytes(task);
  }
  kernels_.attend(wanted, results, max, max + rows, scratch);
  if (task.partial >= 0) return;
  for (int h = 0; h < task.heads; ++h, results += wanted.result_stride) {
    float *out = results, *sums = results + rows * (shape_.head_size + 1);
    for (int row = 0; row < rows; ++row, out += shape_.head_size) {
      const float scale = 1.F / sums[row];
      for (int i = 0; i < shape_.head_size; ++i) out[i] *= scale;
    }
  }
}

// ---- summaries of keys

void AttentionWork::encode(int layer, int chunk, char* local) const {
  const Filled& filled = filled_[size(chunk)];
  const Sequence& one = plan_.sequences[size(filled.sequence)];
  auto* codes = reinterpret_cast<std::uint8_t*>(local);
  for (int head = 0; head < shape_.kv_heads; ++head, codes += bounds_.code_bytes()) {
    Attend wanted = attend_of({filled.sequence, head, 1, 0, 1, 0, one.length, -1}, layer);
    wanted.table = one.table.data();
    const KeySummary summary = bounds_.of_head(layer, head);
    const auto block = static_cast<Size>(one.table[size(filled.block)]);
    kernels_.encode_keys(wanted, filled.block, summary.bounds + block * summary.bounds_stride, codes);
  }
}

void AttentionWork::commit_encoded(int layer, int chunk, const char* local) {
  const Filled& filled = filled_[size(chunk)];
  const std::int64_t block = plan_.sequences[size(filled.sequence)].table[size(filled.block)];
  std::memcpy(bounds_.codes_of(layer, block), local, size(shape_.kv_heads) * bounds_.code_bytes());
}

// ---- what queries look at

void AttentionWork::observe(int layer, int chunk, char* local) const {
  const int sequence = observed_[size(chunk / shape_.kv_heads)], head = chunk % shape_.kv_heads;
  const Sequence& one = plan_.sequences[size(sequence)];
  const int queries = wanted_->queries[size(sequence)];
  auto* weights = reinterpret_cast<float*>(local);
  std::fill_n(weights, table_width_, 0.F);
  AttentionTask task{sequence, head, 1, one.tokens - queries, queries, 0, one.length, -1};
  Attend wanted = attend_of(task, layer);
  wanted.table = one.table.data();
  wanted.first_position = one.length - queries;
  kernels_.block_weights(wanted, KeySummary{}, weights, local + weights_bytes());
}

// Layers follow each other, so each weight is the sum of theirs in order.
void AttentionWork::commit_observed(int chunk, const char* local) {
  const int sequence = observed_[size(chunk / shape_.kv_heads)], head = chunk % shape_.kv_heads;
  float* to = wanted_->weights + size(sequence * shape_.kv_heads + head) * size(table_width_);
  kernels_.add(to, reinterpret_cast<const float*>(local), nullptr, table_width_);
}

// ---- blocks that are read

void AttentionWork::weigh(int layer, int chunk, char* local) const {
  const Sequence& one = plan_.sequences[size(chunk)];
  auto* weights = reinterpret_cast<float*>(local);
  std::fill_n(weights, choice_.weights_of_sequence(), 0.F);
  if (one.seen == one.length) return;
  for (int head = 0; head < shape_.kv_heads; ++head, weights += table_width_) {
    Attend wanted = attend_of({chunk, head, 1, 0, 1, 0, one.length, -1}, layer);
    wanted.table = one.table.data();
    wanted.first_position = one.length - 1;
    kernels_.block_weights(wanted, choice_.summary(bounds_, layer, head), weights, local + weights_bytes());
  }
}

void AttentionWork::commit_weighed(int chunk, const char* local) {
  std::copy_n(reinterpret_cast<const float*>(local), choice_.weights_of_sequence(), choice_.weights_of(chunk));
}

void AttentionWork::choose(int layer, Exchange* ranks) {
  std::vector<float> queries;
  if (choice_.wants_queries()) {
    const Size numbers = size(num_tokens_ * head_numbers());
    queries.resize(numbers);
    if (query_element_ == 4)
      std::memcpy(queries.data(), memory_.queries, numbers * 4);
    else
      kernels_.from_weight(memory_.queries, static_cast<int>(numbers), queries.data());
    if (ranks != nullptr) queries = queries_of_ranks(queries, *ranks);
  }
  choice_.choose(layer, queries.data(), ranks);
}

// [tokens][heads][head size] of the ranks that a choice depends on, from this rank's.
std::vector<float> AttentionWork::queries_of_ranks(const std::vector<float>& own, Exchange& ranks) const {
  const Size numbers = size(head_numbers()), all = numbers * size(shape_.ranks), wanted = numbers * size(choice_.num_ranks());
  std::vector<float> gathered(size(num_tokens_) * all), found(size(num_tokens_) * wanted);
  for (Size i = 0; i < size(num_tokens_); ++i) {
    std::copy_n(own.data() + i * numbers, numbers, gathered.data() + i * all + size(shape_.rank) * numbers);
  }
  ranks.gather(gathered.data(), size(num_tokens_), all, numbers);
  for (Size i = 0; i < size(num_tokens_); ++i) {
    const float* from = gathered.data() + i * all + size(choice_.first_rank()) * numbers;
    std::copy_n(from, wanted, found.data() + i * wanted);
  }
  return found;
}

void AttentionWork::estimate(int layer, int chunk, char* local) const {
  const int number = chunk / shape_.kv_heads, head = chunk % shape_.kv_heads;
  const TileChoice::Tile& tile = tiles_[number];
  const Sequence& one = plan_.sequences[size(tile.sequence)];
  auto* chosen = reinterpret_cast<std::int64_t*>(local);
  char* rest = local + ((tiles_.width() + 1) * 8 + 63) / 64 * 64;
  auto* weights = reinterpret_cast<float*>(rest);
  AttentionTask task{tile.sequence, head, 1, tile.first, tile.tokens, 0, 0, -1};
  Attend wanted = attend_of(task, layer);
  wanted.table = one.table.data();
  wanted.end = wanted.first_position + tile.tokens;
  kernels_.strip_weights(wanted, tiles_.stride(), weights, rest + weights_bytes());
  tiles_.choose(number, weights, chosen);
}

void AttentionWork::commit_estimated(int chunk, const char* local) {
  tiles_.commit(chunk / shape_.kv_heads, chunk % shape_.kv_heads, reinterpret_cast<const std::int64_t*>(local));
}

Size AttentionWork::gathered_query_bytes(const AttentionTask& task) const {
  return task.group < 0 ? 0 : (size(task.tokens * head_numbers()) * query_element_ + 63) / 64 * 64;
}

// The queries of a group lie anywhere among those of the step.
char* AttentionWork::gather_queries(const AttentionPlan& plan, const AttentionTask& task, char* to) const {
  const Size bytes = size(head_numbers()) * query_element_;
  char* at = to;
  for (const int member : plan.groups[size(task.group)].members) {
    const int row = plan.sequences[size(member)].row;
    std::memcpy(at, memory_.queries + size(row) * bytes, bytes);
    at += bytes;
  }
  return to;
}

// To where the results of each member's own splits are.
void AttentionWork::commit_shared(const AttentionPlan& plan, const AttentionTask& task, const char* local) {
  const int rows = task.tokens * share(), numbers = share() * shape_.head_size, together = plan.heads_together;
  const std::int64_t of_head = share() * (shape_.head_size + 2);
  for (int h = 0; h < task.heads; ++h, local += result_bytes(rows)) {
    const auto *results = reinterpret_cast<const float*>(local), *max = results + rows * shape_.head_size;
    const int head = task.head + h;
    for (int member = 0; member < task.tokens; ++member) {
      const int sequence = plan.groups[size(task.group)].members[size(member)];
      const std::int64_t base = plan.partials[size(sequence * (shape_.kv_heads / together) + head / together)];
      float* to = memory_.partials + base + task.partial * together + head % together * of_head;
      std::copy_n(results + member * numbers, numbers, to);
      std::copy_n(max + member * share(), share(), to + numbers);
      std::copy_n(max + rows + member * share(), share(), to + numbers + share());
    }
  }
}

// Rows [tokens][share][head size] of a key head.
void AttentionWork::store_attended(int row, int tokens, int head, const float* from) {
  const int numbers = share() * shape_.head_size;
  const Size stride = size(padded(head_numbers(), 2));
  for (int token = 0; token < tokens; ++token, from += numbers) {
    products_.to_input(
        from, nullptr, numbers,
        memory_.attended + (size(row + token) * stride + size(head) * size(numbers)) * element_);
  }
}

void AttentionWork::commit_attended(int layer, int chunk, const char* local) {
  const AttentionPlan& plan = plan_of(layer);
  const AttentionTask& task = plan.tasks[size(chunk)];
  if (task.group >= 0) return commit_shared(plan, task, local);
  const int rows = task.tokens * share();
  const Size numbers = size(rows * (shape_.head_size + 2));
  for (int h = 0; h < task.heads; ++h, local += result_bytes(rows)) {
    const auto* result = reinterpret_cast<const float*>(local);
    if (task.partial < 0) {
      store_attended(plan.sequences[size(task.sequence)].row + task.first, task.tokens, task.head + h, result);
    } else {
      float* to = memory_.partials + static_cast<Size>(task.partial) + size(h) * numbers;
      std::memcpy(to, result, numbers * 4);
    }
  }
}

void AttentionWork::merge(int layer, int chunk, float* result) const {
  const AttentionPlan& plan = plan_of(layer);
  const AttentionTask& first = plan.merged[size(chunk)];
  const int rows = first.tokens * share(), numbers = rows * (shape_.head_size + 2);
  const int num_splits = plan.sequences[size(first.sequence)].num_splits, stride = first.heads * numbers;
  for (int each = 0; each < first.heads * rows; ++each, result += shape_.head_size) {
    const int row = each % rows;
    const float* part = memory_.partials + first.partial + each / rows * numbers;
    const int at_max = rows * shape_.head_size + row, at_sum = at_max + rows;
    float top = part[at_max], total = 0;
    for (int s = 1; s < num_splits; ++s) top = std::max(top, part[s * stride + at_max]);
    std::fill_n(result, shape_.head_size, 0.F);
    for (int s = 0; s < num_splits; ++s, part += stride) {
      if (part[at_sum] == 0.F) continue;  // outside of the window
      const float weight = std::exp(part[at_max] - top);
      total += weight * part[at_sum];
      for (int i = 0; i < shape_.head_size; ++i) result[i] += weight * part[row * shape_.head_size + i];
    }
    const float scale = 1.F / total;  // as where there is one split
    for (int i = 0; i < shape_.head_size; ++i) result[i] *= scale;
  }
}

void AttentionWork::commit_merged(int layer, int chunk, const float* result) {
  const AttentionPlan& plan = plan_of(layer);
  const AttentionTask& first = plan.merged[size(chunk)];
  for (int h = 0; h < first.heads; ++h, result += first.tokens * share() * shape_.head_size) {
    store_attended(plan.sequences[size(first.sequence)].row + first.first, first.tokens, first.head + h, result);
  }
}

}  // namespace sage::cpu
