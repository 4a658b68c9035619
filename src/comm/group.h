/* comm/group.h - an ordered list of ranks that talk.
 *
 * Calls are collective: every member makes the same ones in the same order. Each collective has a
 * sequence number; operation, dtype and count are compared over the members, and a mismatch fails
 * on all with both ranks named. Sums run in list order in float32, so every member gets the same
 * bits. A group of one short-circuits. Element counts, never bytes. Dtypes: float32, bfloat16,
 * float16, int32 (and any for gather, all_to_all, broadcast). in == out is allowed for all_reduce
 * and broadcast only. */
#pragma once

#include "base/dtype.h"
#include "comm/world.h"
#include "device/tensor.h"
#include "kernels/weft_peer.h"

typedef enum weft_reduce { WEFT_REDUCE_SUM, WEFT_REDUCE_MAX } weft_reduce;

/* Collective over `ranks` (world ranks; this rank is among them; the list order is the group's
 * order). type names it for weft_rank_group and in messages. The creator holds one reference; the
 * rank's list does not hold another. */
weft_status weft_group_create(weft_group **out, weft_rank *rank, weft_group_type type, const int *ranks, int size);
/* Collective: members with equal color make a group, ordered by key, then by rank in the old one.
 * color < 0 takes part in none (*out is NULL). */
weft_status weft_group_split(weft_group *group, int color, int key, weft_group **out);
/* Collective; idempotent. Later calls fail with CLOSED. A finaliser only releases. */
weft_status weft_group_close(weft_group *group);
weft_group *weft_group_retain(weft_group *group);
void weft_group_release(weft_group *group);

int weft_group_size(const weft_group *group);
int weft_group_rank(const weft_group *group); /* place in the list */
const int *weft_group_ranks(const weft_group *group);
weft_group_type weft_group_get_type(const weft_group *group);
weft_rank *weft_group_owner(const weft_group *group);
const char *weft_group_name(const weft_group *group); /* "context {0,1,2,3}" */
/* What carries its collectives on GPU memory: "peer memory up to 128 KB, NCCL above", "NCCL (WEFT_PEER=0)", "threads". */
const char *weft_group_transport(const weft_group *group);
/* Collectives up to so many bytes for each member go over peer memory, as far as it holds them; 0: none.
 * The same on all members, between collectives. Without peer memory it does nothing. */
void weft_group_set_peer_limit(weft_group *group, size_t bytes);

/* The rank's registry: (type, world_size) names a group; a missing one is an error that lists
 * those that exist, never another group. A world_size of 1 always exists. */
weft_status weft_rank_add_group(weft_rank *rank, weft_group *group); /* retains */
weft_status weft_rank_group(weft_rank *rank, weft_group_type type, int world_size, weft_group **out); /* borrowed */
/* The one group of the type with more than one rank; the group of one when there is none; an error
 * that lists them when there are several. */
weft_status weft_rank_only_group(weft_rank *rank, weft_group_type type, weft_group **out); /* borrowed */
/* Collective: closes every registered group, in the order they were added, and forgets them. */
weft_status weft_rank_close_groups(weft_rank *rank);

/* The registered groups as a whole, so that others can take their place and they theirs again. */
typedef struct weft_group_list weft_group_list;
weft_group_list *weft_rank_take_groups(weft_rank *rank);             /* leaves none registered; may be NULL */
void weft_rank_put_groups(weft_rank *rank, weft_group_list *groups); /* takes them over; forgets those of now */
weft_status weft_group_list_close(weft_group_list *groups);          /* collective; frees the list */
void weft_group_list_free(weft_group_list *groups);                  /* only lets go */

weft_status weft_group_barrier(weft_group *group);
weft_status weft_group_all_reduce(weft_group *group, const void *in, void *out, int64_t count, weft_dtype dtype, weft_reduce op);
/* out: size * count, in list order */
weft_status weft_group_all_gather(weft_group *group, const void *in, void *out, int64_t count, weft_dtype dtype);
/* in: size * count; out: this rank's count of the sum */
weft_status weft_group_reduce_scatter(weft_group *group, const void *in, void *out, int64_t count, weft_dtype dtype);
/* in: size * count, part p goes to member p; out: size * count, part p came from member p */
weft_status weft_group_all_to_all(weft_group *group, const void *in, void *out, int64_t count, weft_dtype dtype);
weft_status weft_group_broadcast(weft_group *group, void *data, int64_t count, weft_dtype dtype, int root);
/* Bytes, for plain values: the same size on all members. */
weft_status weft_group_broadcast_bytes(weft_group *group, void *data, size_t bytes, int root);

/* Operations on GPU memory with their collective inside, as one kernel. *done is 0, the same on all
 * members, and nothing has run where no peer memory carries it: then the pieces do (kernels/weft_peer.h).
 * linear: weft_linear, then all_reduce of its dense y; members for which it is not done may be among the others.
 * norm: group_norm_sums, the sum of var, group_norm_apply of 1 or 2 parts.
 * dcp: the exchange of partial attention results, its combination and merge. */
weft_status weft_group_linear_over(weft_group *group, const weft_linear_args *args, int *done);
weft_status weft_group_norm_over(weft_group *group, const weft_group_norm_args *parts, int count, int *done);
weft_status weft_group_dcp_over(weft_group *group, const weft_peer_dcp_args *args, int *done);

/* Along any dimension of tensors. out is made by the caller: shape[dim] * size (gather) or
 * shape[dim] / size (scatter). */
weft_status weft_group_all_gather_dim(weft_group *group, const weft_tensor *in, int dim, weft_tensor *out);
weft_status weft_group_reduce_scatter_dim(weft_group *group, const weft_tensor *in, int dim, weft_tensor *out);

/* What this rank sent through the group so far: for `weft plan`, bench and specs. */
typedef struct weft_group_traffic {
    /* bytes for other members: (n - 1) parts of a gather, scatter or all_to_all; of an all_reduce
     * what both its halves need, 2 (n - 1) / n of the input */
    uint64_t calls, bytes_sent;
    double seconds;             /* spent inside, waiting included */
} weft_group_traffic;
weft_group_traffic weft_group_get_traffic(const weft_group *group);
