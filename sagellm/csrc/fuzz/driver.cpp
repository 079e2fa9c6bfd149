// Runs a fuzz target where there is no libFuzzer: g++ has the sanitizers and the coverage calls, but no driver.
//
// Takes libFuzzer's names for what it can do: -max_total_time=SECONDS -runs=N -seed=N -max_len=BYTES
// -artifact_prefix=PATH, then folders, whose files it starts from, or files, which are only replayed.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <unordered_set>
#include <vector>

#include "coverage.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)());

namespace {

using Input = std::vector<std::uint8_t>;
using Clock = std::chrono::steady_clock;

constexpr unsigned kSecondsPerInput = 20;

struct Options {
  double seconds = 0;      // 0: no limit
  std::uint64_t runs = 0;  // 0: no limit
  std::uint64_t seed = 1;
  std::size_t max_bytes = 600;
  std::string prefix = "./";
  std::vector<std::filesystem::path> paths;
};

// The input that runs now, and the file that gets it when the process dies.
const Input* current = nullptr;
std::string failing_path;
const char* program = "";

void keep_current() {
  if (current == nullptr) return;
  const Input* input = current;
  current = nullptr;
  std::ofstream(failing_path, std::ios::binary)
      .write(reinterpret_cast<const char*>(input->data()), static_cast<std::streamsize>(input->size()));
  std::fprintf(stderr, "\nfailing input, %zu bytes: %s\nreplay: %s %s\n", input->size(), failing_path.c_str(), program,
               failing_path.c_str());
}

void on_signal(int signal) {
  if (signal == SIGALRM) std::fprintf(stderr, "finding: an input takes more than %u s\n", kSecondsPerInput);
  keep_current();
  std::signal(signal, SIG_DFL);
  std::raise(signal == SIGALRM ? SIGABRT : signal);
}

void run_one(const Input& input) {
  current = &input;
  alarm(kSecondsPerInput);
  LLVMFuzzerTestOneInput(input.data(), input.size());
  alarm(0);
  current = nullptr;
}

Input read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    std::fprintf(stderr, "cannot read %s\n", path.c_str());
    std::exit(2);
  }
  return Input(std::istreambuf_iterator<char>(file), {});
}

class Corpus {
 public:
  // Keeps an input that ran through something new.
  void consider(const Input& input) {
    const std::size_t before = seen_.size();
    for (const std::uint32_t feature : sage::fuzz::covered()) seen_.insert(feature);
    if (seen_.size() > before || inputs_.empty()) inputs_.push_back(input);
  }
  std::size_t size() const { return inputs_.size(); }
  std::size_t num_features() const { return seen_.size(); }
  const Input& pick(std::mt19937_64& random) const {
    // The latest are the least explored.
    const std::size_t half = inputs_.size() / 2;
    return random() % 2 == 0 ? inputs_[random() % inputs_.size()] : inputs_[half + random() % (inputs_.size() - half)];
  }

 private:
  std::vector<Input> inputs_;
  std::unordered_set<std::uint32_t> seen_;
};

Input random_input(std::size_t max_bytes, std::mt19937_64& random) {
  Input input(1 + random() % max_bytes);
  for (std::uint8_t& byte : input) byte = static_cast<std::uint8_t>(random());
  return input;
}

void change(Input& input, const Input& other, std::mt19937_64& random) {
  if (input.empty()) input.push_back(0);
  const std::size_t at = random() % input.size(), length = 1 + random() % std::min<std::size_t>(input.size() - at, 32);
  const auto here = input.begin() + static_cast<std::ptrdiff_t>(at);
  switch (random() % 7) {
    case 0:
      *here = static_cast<std::uint8_t>(random());
      break;
    case 1:
      *here = static_cast<std::uint8_t>(*here ^ (1u << random() % 8));
      break;
    case 2:
      *here = static_cast<std::uint8_t>(*here + random() % 9 - 4);
      break;
    case 3:
      input.erase(here, here + static_cast<std::ptrdiff_t>(length));
      break;
    case 4: {
      const Input copy(here, here + static_cast<std::ptrdiff_t>(length));
      input.insert(input.begin() + static_cast<std::ptrdiff_t>(random() % input.size()), copy.begin(), copy.end());
      break;
    }
    case 5: {
      const Input fresh = random_input(16, random);
      input.insert(here, fresh.begin(), fresh.end());
      break;
    }
    default: {
      const std::size_t from = other.empty() ? 0 : random() % other.size();
      input.erase(here, input.end());
      input.insert(input.end(), other.begin() + static_cast<std::ptrdiff_t>(from), other.end());
    }
  }
}

Input next_input(const Corpus& corpus, std::size_t max_bytes, std::mt19937_64& random) {
  if (corpus.size() == 0 || random() % 32 == 0) return random_input(max_bytes, random);
  Input input = corpus.pick(random);
  for (std::size_t n = 1 + random() % 6; n > 0; --n) change(input, corpus.pick(random), random);
  if (input.size() > max_bytes) input.resize(max_bytes);
  return input;
}

void fuzz(const Options& options) {
  std::mt19937_64 random(options.seed);
  Corpus corpus;
  std::vector<Input> first{Input()};
  for (const auto& folder : options.paths) {
    for (const auto& file : std::filesystem::directory_iterator(folder)) first.push_back(read_file(file.path()));
  }
  const auto start = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  std::uint64_t runs = 0;
  double told = 0;
  while ((options.runs == 0 || runs < options.runs) && (options.seconds == 0 || elapsed() < options.seconds)) {
    const Input input = runs < first.size() ? first[runs] : next_input(corpus, options.max_bytes, random);
    sage::fuzz::start_coverage();
    run_one(input);
    corpus.consider(input);
    ++runs;
    if (elapsed() >= told + 10) {
      told = elapsed();
      std::fprintf(stderr, "%.0f s: %llu inputs, %zu kept, %zu edges\n", told, static_cast<unsigned long long>(runs),
                   corpus.size(), corpus.num_features());
    }
  }
  std::printf("no finding: %llu inputs in %.1f s, %zu kept, %zu edges%s\n", static_cast<unsigned long long>(runs),
              elapsed(), corpus.size(), corpus.num_features(),
              corpus.num_features() == 0 ? " (compiled without coverage)" : "");
}

Options parse(int argc, char** argv) {
  Options options;
  const auto value = [](const std::string& text, const char* name, std::string& out) {
    if (text.rfind(name, 0) != 0) return false;
    out = text.substr(std::string(name).size());
    return true;
  };
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    std::string got;
    if (value(text, "-max_total_time=", got)) {
      options.seconds = std::stod(got);
    } else if (value(text, "-runs=", got)) {
      options.runs = std::stoull(got);
    } else if (value(text, "-seed=", got)) {
      options.seed = std::stoull(got);
    } else if (value(text, "-max_len=", got)) {
      options.max_bytes = std::max<std::size_t>(1, std::stoull(got));
    } else if (value(text, "-artifact_prefix=", got)) {
      options.prefix = got;
    } else if (text[0] == '-') {
      std::fprintf(stderr, "unknown option %s; see the top of driver.cpp\n", text.c_str());
      std::exit(2);
    } else {
      options.paths.emplace_back(text);
    }
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  program = argv[0];
  failing_path = options.prefix + "failing-input-" + std::to_string(getpid());
  std::signal(SIGABRT, on_signal);
  std::signal(SIGALRM, on_signal);
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(keep_current);

  const bool replay = !options.paths.empty() && !std::filesystem::is_directory(options.paths.front());
  if (!replay) {
    fuzz(options);
    return 0;
  }
  for (const auto& path : options.paths) {
    const Input input = read_file(path);
    std::printf("replaying %s, %zu bytes\n", path.c_str(), input.size());
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("no finding\n");
  return 0;
}
