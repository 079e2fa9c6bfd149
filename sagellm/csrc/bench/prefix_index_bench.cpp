// How close a lookup comes to comparing the tokens and nothing else.
//
//   prefix_index_bench WORKLOAD [ROUNDS]
//
// WORKLOAD is what `benchmarks/prefix/native.py` writes: int32 numbers, every text preceded by its length,
//
//   block_size num_systems {text} num_documents {system text} num_sequences {document text} num_lookups {document text}
//
// where a document follows the system prompt it names, and the text of a sequence or a lookup is the tail that follows its
// document. The sequences are inserted, then passes over all lookups alternate with passes of memcmp that compare the same
// tokens, in the same order, with a copy of the system prompts and documents laid out as they were read. Each pass follows one
// of the other kind, so both find the caches alike. Prints one JSON object; times are CPU time of the thread, one value a
// round.

#include <time.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "sagellm/prefix_index.h"

namespace {

using sage::BlockId;
using sage::Token;
using Text = std::vector<Token>;

struct Document {
  std::size_t system = 0;
  Text text;
};

struct Query {
  std::size_t document = 0;
  Text tokens;
};

struct Workload {
  std::size_t block_size = 0;
  std::vector<Text> systems;
  std::vector<Document> documents;
  std::vector<Query> sequences, lookups;
};

class Reader {
 public:
  explicit Reader(const char* path) : file_(path, std::ios::binary) {
    if (!file_) throw std::runtime_error(std::string(path) + " cannot be read");
  }
  std::size_t number() {
    std::int32_t value = 0;
    read(&value, sizeof value);
    if (value < 0) throw std::runtime_error("a negative length or place in the workload");
    return static_cast<std::size_t>(value);
  }
  Text text() {
    Text tokens(number());
    read(tokens.data(), tokens.size() * sizeof(Token));
    return tokens;
  }

 private:
  void read(void* out, std::size_t num_bytes) {
    if (!file_.read(static_cast<char*>(out), static_cast<std::streamsize>(num_bytes))) {
      throw std::runtime_error("the workload ends early");
    }
  }
  std::ifstream file_;
};

std::vector<Query> read_queries(Reader& reader, const Workload& workload) {
  std::vector<Query> queries(reader.number());
  for (Query& query : queries) {
    query.document = reader.number();
    const Document& document = workload.documents.at(query.document);
    const Text& system = workload.systems.at(document.system);
    const Text tail = reader.text();
    query.tokens.reserve(system.size() + document.text.size() + tail.size());
    for (const Text* part : {&system, &document.text, &tail}) {
      query.tokens.insert(query.tokens.end(), part->begin(), part->end());
    }
  }
  return queries;
}

Workload read_workload(const char* path) {
  Reader reader(path);
  Workload workload;
  workload.block_size = reader.number();
  workload.systems.resize(reader.number());
  for (Text& system : workload.systems) system = reader.text();
  workload.documents.resize(reader.number());
  for (Document& document : workload.documents) {
    document.system = reader.number();
    document.text = reader.text();
  }
  workload.sequences = read_queries(reader, workload);
  workload.lookups = read_queries(reader, workload);
  return workload;
}

double cpu_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

// Inserts every sequence with fresh ids for what is not cached yet. Returns ns a token.
double insert_all(sage::PrefixIndex& index, const Workload& workload) {
  double taken_ns = 0;
  std::size_t num_tokens = 0;
  BlockId fresh = 0;
  sage::Match match;
  for (const Query& sequence : workload.sequences) {
    index.lookup("", sequence.tokens.data(), sequence.tokens.size(), match, false);
    std::vector<BlockId> ids = match.path.blocks;
    while (ids.size() < sequence.tokens.size() / workload.block_size) ids.push_back(fresh++);
    const double start_ns = cpu_ns();
    index.insert("", sequence.tokens.data(), sequence.tokens.size(), ids.data(), ids.size());
    taken_ns += cpu_ns() - start_ns;
    num_tokens += ids.size() * workload.block_size;
  }
  return taken_ns / static_cast<double>(num_tokens);
}

// ns a lookup.
double pass_lookup(sage::PrefixIndex& index, const Workload& workload, std::size_t& num_matched) {
  sage::Match match;
  num_matched = 0;
  const double start_ns = cpu_ns();
  for (const Query& query : workload.lookups) {
    index.lookup("", query.tokens.data(), query.tokens.size(), match);
    num_matched += match.path.blocks.size();
  }
  return (cpu_ns() - start_ns) / static_cast<double>(workload.lookups.size());
}

// The same tokens compared: full blocks of system prompt and document. ns a lookup.
double pass_memcmp(const Workload& workload, std::size_t& num_matched) {
  num_matched = 0;
  const double start_ns = cpu_ns();
  for (const Query& query : workload.lookups) {
    const Document& document = workload.documents[query.document];
    const Text& system = workload.systems[document.system];
    const std::size_t num_blocks = (system.size() + document.text.size()) / workload.block_size;
    const std::size_t num_rest = num_blocks * workload.block_size - system.size();
    const int differs =
        std::memcmp(query.tokens.data(), system.data(), system.size() * sizeof(Token)) |
        std::memcmp(query.tokens.data() + system.size(), document.text.data(), num_rest * sizeof(Token));
    num_matched += differs == 0 ? num_blocks : 0;
  }
  return (cpu_ns() - start_ns) / static_cast<double>(workload.lookups.size());
}

void print(const char* name, const std::vector<double>& values, const char* end) {
  std::printf("\"%s\": [", name);
  for (std::size_t i = 0; i < values.size(); ++i) std::printf("%s%.1f", i == 0 ? "" : ", ", values[i]);
  std::printf("]%s", end);
}

void run(const char* path, int num_rounds) {
  const Workload workload = read_workload(path);
  if (workload.lookups.empty()) throw std::runtime_error("the workload has no lookups");
  sage::PrefixIndex index(workload.block_size);
  const double insert_ns = insert_all(index, workload);
  std::vector<double> lookup_ns, memcmp_ns;
  std::size_t num_found = 0, num_equal = 0;
  for (int round = -1; round < num_rounds; ++round) {  // the first one warms up
    const double lookup = pass_lookup(index, workload, num_found);
    const double compare = pass_memcmp(workload, num_equal);
    if (num_found != num_equal) {
      throw std::runtime_error("lookups found " + std::to_string(num_found) + " blocks, " + std::to_string(num_equal) +
                               " are equal");
    }
    if (round < 0) continue;
    lookup_ns.push_back(lookup);
    memcmp_ns.push_back(compare);
  }
  const std::size_t num_cached = index.num_blocks(sage::Tier::kGpu) * workload.block_size;
  std::printf("{\"block_size\": %zu, \"num_sequences\": %zu, ", workload.block_size, workload.sequences.size());
  std::printf("\"tokens_matched_a_lookup\": %.1f, ",
              static_cast<double>(num_found * workload.block_size) / static_cast<double>(workload.lookups.size()));
  std::printf("\"insert_ns_per_token\": %.3f, \"bytes_per_token\": %.3f, ", insert_ns,
              static_cast<double>(index.memory_bytes()) / static_cast<double>(num_cached));
  print("lookup_ns", lookup_ns, ", ");
  print("memcmp_ns", memcmp_ns, "}\n");
}

}  // namespace

int main(int argc, char** argv) {
  const int num_rounds = argc == 3 ? std::atoi(argv[2]) : 20;
  if (argc < 2 || argc > 3 || num_rounds < 1) {
    std::cerr << "usage: prefix_index_bench WORKLOAD [ROUNDS]\n";
    return 2;
  }
  try {
    run(argv[1], num_rounds);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
