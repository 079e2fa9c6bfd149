/* The hook table of TurboMind: what the engine asks and tells, and what it can be asked from inside a hook. Plain C.
 *
 * Whoever wants to steer the engine fills a SageHooks and installs it before the engine is made: from Python with a
 * capsule named SAGE_HOOKS_CAPSULE that holds its address, from C++ with turbomind::sage::install(). Every function may be
 * null; a hook that is null costs one branch.
 *
 * Lifetime. The engine copies the table and keeps the copy for good; `ctx` and the functions must stay valid as long as the
 * process. An engine keeps the table that was installed when its cache was made (at start, and again at each wakeup), so
 * installing or removing one never changes an engine that runs. Communicators keep the one of their creation.
 *
 * Threads. Each rank of a tensor-parallel group is a thread of its own in one process, and calls hooks on that thread,
 * without the GIL and without a lock; the ranks of a group call concurrently. `admit` is called under the lock of the
 * request queue. `reset` comes from the thread that puts the engine to sleep or ends it, when the rank's own has ended. A
 * hook must not throw, must not block for long, and must not call the API of another manager.
 *
 * Ranks. The ranks of a group are replicas: each makes the same calls in the same order and must get the same answers, or
 * their collectives no longer match. `schedule` and `admit` are asked on rank 0 alone and the answer is broadcast; `evict`
 * and `prefix_lookup` are asked on every rank. An implementation that is not a pure function of its arguments decides once
 * and replays the decision to the other ranks.
 *
 * Versions. SAGE_HOOKS_ABI changes when the meaning of something changes; then tables are refused. Otherwise structures that
 * begin with `struct_size` only ever grow at their end: whoever reads one takes what lies beyond its size as zero. Those
 * without `struct_size` travel in arrays and never change within an ABI.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SAGE_HOOKS_ABI 1u
#define SAGE_HOOKS_CAPSULE "sage.hooks.v1"

/* A priority for `schedule`: the sequence takes no part in this step. It keeps its blocks unless others need them. */
#define SAGE_PRIORITY_HOLD UINT64_MAX

enum SageFlags {
    SAGE_REPLACE_TRIE = 1u, /* prefix_lookup and prefix_store stand for the engine's own prefix index, which stays empty */
    SAGE_TIME_COMM = 2u     /* comm_end waits for the duration of each operation */
};
enum SageBlockState { SAGE_BLOCK_FREE = 0, SAGE_BLOCK_CACHED = 1, SAGE_BLOCK_ACTIVE = 2 };
enum SageMoveKind {
    SAGE_OFFLOAD = 1, /* a cached block is copied to `host`; it stays cached */
    SAGE_RESTORE = 2, /* a free block is filled from `host` and becomes a cached one */
    /* A cached block gives way: it is filled from `host` and is another cached block from then on. For a pool that was full
     * once, which has no free block between two rounds. `evicted` is not told, since whoever asks knows. Only with
     * SAGE_REPLACE_TRIE: the engine's own index would still name the block. */
    SAGE_REPLACE = 3
};
enum SageMoveStatus {
    SAGE_MOVED = 0,            /* the copy is enqueued on the engine's stream */
    SAGE_NO_SUCH_BLOCK = -1,   /* out of range, not cached, or another one than `unique_id` names */
    SAGE_NO_FREE_BLOCK = -2,   /* a restore takes a free block; it never evicts */
    SAGE_BAD_MOVE = -3         /* unknown kind, no host memory, or not from this hook */
};
enum SageSequenceStatus {
    SAGE_SEQUENCE_CACHED = 0, /* not in the batch so far, or preempted: holds no blocks for sure */
    SAGE_SEQUENCE_LOCKED = 1, /* holds blocks, takes no part in the current step */
    SAGE_SEQUENCE_ACTIVE = 2
};
enum SageStoreKind { SAGE_STORE_PROMPT = 1, SAGE_STORE_GENERATION = 2 };
enum SageCommOp {
    SAGE_COMM_ALL_REDUCE = 1,
    SAGE_COMM_ALL_GATHER = 2,
    SAGE_COMM_REDUCE_SCATTER = 3,
    SAGE_COMM_ALL_REDUCE_RMSNORM = 4,    /* one fused operation */
    SAGE_COMM_ALL_REDUCE_RMSNORM_EX = 5, /* the same over two groups */
    SAGE_COMM_ALL_GATHER_2D = 6,
    SAGE_COMM_BROADCAST = 7
};

/* ---- what hooks can ask. Valid inside a hook, on its thread, for the manager it was given. */

typedef struct SageBlockInfo {
    int32_t id, use_count; /* use_count: sequences that hold the block */
    int32_t state, reserved;
    uint64_t unique_id; /* another one each time the block is allocated; 0 while it is free */
    uint64_t timestamp; /* the engine's own clock of uses, larger is more recent */
} SageBlockInfo;

typedef struct SageMove {
    int32_t kind;
    int32_t block_id;   /* offload, replace: which block. restore: set by the engine */
    uint64_t unique_id; /* offload, replace: as it was told, or 0 for any. restore, replace: set by the engine */
    void* host;         /* `block_bytes` bytes, all layers; pinned memory where the copy is to be asynchronous */
    int32_t status;     /* set by the engine: SageMoveStatus */
    int32_t reserved;
} SageMove;

typedef struct SageCounts {
    uint32_t struct_size, reserved;
    int32_t total, free, cached, active; /* blocks allocated so far, and what they are */
    int32_t max_blocks;                  /* `total` may grow up to it */
    int32_t block_len;                   /* tokens of a block */
    uint64_t block_bytes;                /* of this rank */
} SageCounts;

typedef struct SageKvApi {
    uint32_t abi, struct_size;
    /* Fills `out` for n ids; an id out of range gets state SAGE_BLOCK_FREE and unique_id 0. Returns n. */
    int32_t (*block_info)(void* manager, const int32_t* ids, int32_t n, SageBlockInfo* out);
    /* `out->struct_size` must be set. */
    void (*counts)(void* manager, SageCounts* out);
    /* In order, each with a status of its own; returns how many were moved. Every rank moves its own share of a block, so a
     * plan must be made on all ranks of a group alike. From `evict`, `evicted`, `released` and `reset` nothing can be moved. */
    int32_t (*migrate)(void* manager, SageMove* moves, int32_t n);
} SageKvApi;

/* ---- what hooks are given */

/* The block manager of one rank. The same (engine, group, generation) on several ranks: replicas. */
typedef struct SageManager {
    uint32_t struct_size, reserved;
    void* manager;
    const SageKvApi* api;
    uint64_t engine;     /* one number an engine, another one for every other engine of the process */
    int32_t group;       /* data-parallel rank: which set of replicas */
    int32_t rank, n_ranks; /* tensor-parallel rank and size */
    int32_t block_len;
    uint64_t generation; /* 1 at first, one more after each wakeup: block ids and unique ids begin anew */
    uint64_t epoch;      /* scheduling rounds of this generation so far; equal on all ranks in the same round */
    void* stream;        /* cudaStream_t; null on the host */
} SageManager;

/* A sequence. Pointers are valid during the call. */
typedef struct SageSequence {
    uint64_t seq_id;
    uint64_t priority; /* smaller goes first; unique among the sequences of a group */
    int32_t status, context_len;
    int32_t cache_len; /* tokens whose KV is computed */
    int32_t n_blocks;
    const int32_t* blocks;
    const uint64_t* unique_ids;
    const int32_t* prompt; /* null once the prompt is computed */
    int32_t n_prompt, reserved;
} SageSequence;

typedef struct SageRequest {
    uint64_t seq_id;
    int32_t n_tokens, max_new_tokens;
} SageRequest;

typedef struct SageStep {
    uint32_t struct_size;
    int32_t group;
    uint64_t engine, step;
    int32_t max_batch, default_budget; /* default_budget: new tokens that the engine would compute at most */
    int32_t max_budget;                /* what its buffers hold */
    int32_t free_blocks, cached_blocks, active_blocks;
} SageStep;

typedef struct SageStepResult {
    uint32_t struct_size;
    int32_t group;
    uint64_t engine, step;
    int32_t n_sequences, n_tokens; /* that took part, and tokens computed for them */
    int32_t n_finished, reserved;
} SageStepResult;

typedef struct SageComm {
    uint32_t struct_size;
    int32_t op, group, rank, n_ranks; /* group: of the communicator, as the engine numbers them */
    int32_t reserved;
    uint64_t bytes; /* of this rank's input */
    void* stream;
} SageComm;

/* ---- the table */

typedef struct SageHooks {
    uint32_t abi, struct_size, flags, reserved;
    void* ctx;

    /* Blocks (0001). */

    /* Choose `count` of the `n` cached blocks, ascending ids in `cached`, to be given up. Returns how many were written to
     * `victims`. Ids that are not cached or named twice are ignored; what is missing the engine adds, least recent first. */
    int32_t (*evict)(void* ctx, const SageManager* manager, const int32_t* cached, int32_t n, int32_t count,
                     int32_t* victims);
    /* These blocks are about to become free: told before an id can be given out again. */
    void (*evicted)(void* ctx, const SageManager* manager, const int32_t* ids, const uint64_t* unique_ids, int32_t n);
    /* A sequence gives up its hold on these blocks: it ended, or it was preempted. Before the next round those that nobody
     * else holds become cached. */
    void (*released)(void* ctx, const SageManager* manager, uint64_t seq_id, const int32_t* ids,
                     const uint64_t* unique_ids, int32_t n);
    /* The manager is about to go (sleep, shutdown): nothing of this generation is valid after this. */
    void (*reset)(void* ctx, const SageManager* manager);

    /* Prefix cache (0002). Called only where the engine's prefix caching is on. */

    /* Find cached blocks that hold the beginning of `sequence->prompt`, at most `max_blocks`. Returns their number, or -1 to
     * have the engine look (not with SAGE_REPLACE_TRIE). Asked for a sequence of which nothing is computed, in every round
     * until it runs. The engine checks each block and cuts the answer at the first that is not what `unique_ids` says. */
    int32_t (*prefix_lookup)(void* ctx, const SageManager* manager, const SageSequence* sequence, int32_t max_blocks,
                             int32_t* ids, uint64_t* unique_ids);
    /* The first n_blocks blocks of a sequence are computed; `tokens` are the n_blocks * block_len tokens that they hold.
     * Told after each pass that computed prompt tokens, and once at the end of a sequence that holds blocks, with what was
     * generated; then n_blocks may be 0: nothing of it is to be shared. */
    void (*prefix_store)(void* ctx, const SageManager* manager, uint64_t seq_id, int32_t kind, const int32_t* tokens,
                         const int32_t* ids, const uint64_t* unique_ids, int32_t n_blocks);

    /* Scheduling (0003), on rank 0. */

    /* Order, hold and bound a step. `priorities` come as the engine set them and may be rewritten (they must stay distinct,
     * apart from SAGE_PRIORITY_HOLD); `budget` comes as `default_budget`. Under memory pressure the largest priorities are
     * preempted. Returns 0 if the answer is to be used, anything else to leave the step to the engine. One sequence always
     * runs, whatever is held. */
    int32_t (*schedule)(void* ctx, const SageStep* step, const SageSequence* sequences, int32_t n, uint64_t* priorities,
                        int32_t* budget);
    /* Requests that wait for a place in the batch, in order of arrival; at most `max_admitted` fit. Write the places in
     * `requests` of those that may join, in order, to `admitted`; returns their number, or -1 to leave it to the engine. */
    int32_t (*admit)(void* ctx, uint64_t engine, int32_t group, const SageRequest* requests, int32_t n,
                     int32_t max_admitted, int32_t* admitted);
    void (*step_end)(void* ctx, const SageStepResult* result);

    /* Collectives (0004). */

    /* Before a collective is enqueued; what it returns is handed to comm_end. */
    void* (*comm_begin)(void* ctx, const SageComm* comm);
    /* After it was enqueued, `milliseconds` being -1; with SAGE_TIME_COMM once the device has finished it, with its duration,
     * which includes waiting for the slowest rank; told at a later collective of this communicator, or at its end. */
    void (*comm_end)(void* ctx, const SageComm* comm, void* token, float milliseconds);
} SageHooks;

#ifdef __cplusplus
}
#endif
