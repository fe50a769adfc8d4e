"""Mistakes that a test has to notice: each is made in a copy of the repository, where the named test must then fail.

    python tests/tools/mutate.py                # all: a quarter of an hour
    python tests/tools/mutate.py ties clusters  # those with such a word in their names

tests/tools/test_mutations.py checks that the text of each mutation stands in its file once.
"""
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "results", "real_model", "__pycache__", "*.egg-info")


@dataclass(frozen=True)
class Mutation:
    """`old`, which stands in the file once, is replaced by `new`; `test` is a test, as pytest takes it."""

    name: str
    file: str
    old: str
    new: str
    test: str


PARIS = "torchsparsekv/_methods/pariskv.py"
DEFAULT = "tests/methods/test_defaults.py::test_defaults_of_a_method[pariskv]"
PROXIES = "return x @ (2.0 * bits - 1).T"
STABLE = "scores.argsort(dim=-1, descending=True, stable=True)[..., : min(k, n)]"
ROOM = "room = (budget - (end - begin).cumsum(0) + (end - begin)).clamp(min=0)"
SNAP = "ops/snapkv/snap_tokens.py"
PAPERS = "tests/methods/test_snapkv.py::test_one_query_head_per_kv_head_equals_the_paper"
CHUNKS = "tests/methods/test_snapkv.py::test_ragged_chunks_and_turns_keep_equal_tokens"
REMAINING = "ops/rest/_remaining.py"
DEFINITION = "tests/methods/test_estimate_rest.py::test_step_equals_definition_from_raw_keys_and_values"
SUMS, ROW_SUMS = "ops/rest/group_sums.py", "tests/ops/rest/test_row_sums.py"
APPENDED = "tests/ops/rest/test_append_sums.py::test_sums_equal_means_of_raw_keys_and_values"
OMNI, STAMPS = "torchsparsekv/_methods/omnikv.py", "ops/raas/stamp_pages.py"
HEAVY = "tests/methods/test_h2o.py::test_one_query_head_per_kv_head_equals_the_authors_code"
ESTIMATED = "tests/methods/test_retroinfer.py::test_step_equals_definition_from_raw_keys_and_values"
ANSWER = "tests/methods/test_raas.py::test_pages_of_a_long_answer_equal_brute_force"
LISTED, BLOCK_REST = "ops/engine/listed_attention.py", "ops/engine/_remaining.py"
ENGINE_RESTS = "tests/ops/engine/test_engine_blocks.py::test_random_requests_equal_brute_force[device-rest]"
LISTED_KERNELS = "tests/ops/engine/test_listed_attention.py::test_kernels_equal_reference_with_the_rest"
FILLED_SUMS = "tests/ops/_machinery/test_ops.py::test_kernel_equals_reference[filled_sums-triton]"
MUTATIONS = (
    Mutation("beta above 30K is 0.001", PARIS, "(None, 0.05, 0.7)", "(None, 0.001, 0.7)", DEFAULT),
    Mutation("the heads of a group choose by their mean query", PARIS,
             'group: str = option("max"', 'group: str = option("mean"', DEFAULT),
    Mutation("clusters are of consecutive tokens", "ops/clusters/_kmeans.py",
             "    return means(x, cluster, centres), cluster",
             "    cluster = (torch.arange(x.shape[1]) * clusters // x.shape[1]).expand_as(cluster)\n"
             "    return means(x, cluster, centres), cluster",
             "tests/ops/clusters/test_cluster_content.py"),
    Mutation("centroids have the wrong sign", "ops/pariskv/centroid_votes.py", PROXIES, PROXIES.replace("@ ", "@ -"),
             "tests/methods/test_pariskv.py::test_stage_one_equals_equation_15"),
    Mutation("a bit of an id is set where the key is negative", "ops/pariskv/encode_keys.py",
             "ids = (positive <<", "ids = (~positive <<",
             "tests/methods/test_defaults.py::test_id_bits_are_signs_of_the_rotated_key"),
    # ---- index
    Mutation("the mean cuboid is the whole one", "ops/index/block_bounds.py",
             "spread = away.abs().mean(-2)", "spread = away.abs().amax(-2)",
             "tests/methods/test_methods.py::test_arkvale_chooses_exactly_by_its_definition"),
    Mutation("of nodes that are as near, a child has the last", "ops/icecache/_tree.py",
             "node = tl.min(tl.where(top == best[:, None], node, 0x7FFFFFFF), 1)",
             "node = tl.max(tl.where(top == best[:, None], node, -1), 1)",
             "tests/ops/icecache/test_plant_tree.py::test_kernel_equals_reference_with_many_tokens"),
    Mutation("children of a node lie apart", "ops/icecache/_tree.py", "torch.where(moves, node + 1,",
             "torch.where(moves, 1,",
             "tests/ops/icecache/test_plant_tree.py::test_children_of_a_node_lie_side_by_side"),
    Mutation("neighbours of a tree are ranked by the same program", "ops/icecache/_tree.py",
             "stay + spread_pages(row // page, pages) * page + row % page", "stay + row",
             "tests/ops/icecache/test_plant_tree.py::test_children_of_a_node_lie_side_by_side"),
    Mutation("tokens that are nodes differ by what 8 bits leave", "ops/icecache/_residual.py",
             "torch.where(mark[..., None] < 0, 0, keys.float() - nodes)", "keys.float() - nodes",
             "tests/ops/_machinery/test_ops.py::test_kernel_equals_reference[plant_tree-triton]"),
    Mutation("the norms of nodes are not stored", "ops/icecache/_tree.py",
             "tl.store(norm2 + u, tl.sum(wide * wide, 1), mask=live)", "pass",
             "tests/ops/icecache/test_plant_tree.py::test_kernel_equals_reference_with_many_tokens"),
    Mutation("tokens rise by another cache's size while decoding", "torchsparsekv/_methods/icecache.py",
             "self.promoted(region), region)", "self.promoted(1 << 21), region)",
             "tests/ops/_machinery/test_large.py::test_promotion_follows_the_size_of_the_cache"),
    Mutation("a head that follows one is matched by what it shares least of", "ops/icecache/share_prompt.py",
             "(2 * common_tokens(top_tokens, source_top_tokens) + same_number).argmax(-1)",
             "(2 * common_tokens(top_tokens, source_top_tokens) + same_number).argmin(-1)",
             "tests/methods/test_icecache_reuse.py::test_head_follows_the_head_with_the_most_shared_tokens"),
    Mutation("what a layer loses by another includes what it loses anyway", "benchmarks/quality/selecting_layers.py",
             "(by - by[x]).clamp(min=0)", "by.clamp(min=0)",
             "tests/commands/test_selecting_layers.py::test_own_loss_of_a_layer_is_subtracted_and_samples_are_summed"),
    Mutation("a layer's choice is tried for the heads of its number", "benchmarks/quality/selecting_layers.py",
             "if layer != chooser else slice(None)", "if layer == chooser else slice(None)",
             "tests/commands/test_selecting_layers.py::test_loss_of_a_layer_equals_brute_force"),
    Mutation("a head attends to what that of its number chose, whichever it follows", "ops/icecache/share_step.py",
             "tl.load(selected_pages + source * n + j", "tl.load(selected_pages + bh * n + j",
             "tests/ops/_machinery/test_ops.py::test_kernel_equals_reference -k share_step"),
    Mutation("a weight is of the length, not of its square", "ops/pariskv/encode_keys.py",
             "square / aligned * size", "square.sqrt() / aligned * size",
             "tests/methods/test_pariskv.py::test_estimate_correlates_with_the_inner_product"),
    Mutation("a segment is cut one token late", "ops/clusters/find_boundary.py",
             "(boundary and size >= rule.shortest)", "(boundary and size > rule.shortest)",
             "tests/methods/test_clusters.py::test_segments_are_cut_at_boundaries"),
    Mutation("what waits in the ring is no unit when a prompt comes", "ops/clusters/close_segments.py",
             "min(n0, end), sink, True)", "min(n0, end), sink, False)",
             "tests/methods/test_clusters.py::test_every_token_is_stored_exactly_once"),
    Mutation("generated tokens are in the pool as they came, not by cluster", "ops/clusters/cluster_ring.py",
             "= rows.gather(1, order[..., None, None].expand_as(rows))", "= rows",
             "tests/methods/test_clusters.py::test_generated_tokens_are_clustered_in_batches"),
    Mutation("the kernel keeps a query where the next step does not look", "ops/clusters/find_boundary.py",
             "tl.store(previous_at + n % 2 * Q * D, compared",
             "tl.store(previous_at + (n + 1) % 2 * Q * D, compared",
             "tests/ops/_machinery/test_ops.py::test_kernel_equals_reference -k find_boundary"),
    Mutation("late heads do not see what left the ring", "ops/gather/query_drift_gate.py",
             "torch.where(prefetch.later > 0, before, end)", "torch.where(prefetch.later > 0, end, end)",
             "tests/ops/gather/test_prefetch_async.py -k dense"),
    Mutation("heads are late at the first step after a prompt", "ops/gather/query_drift_gate.py",
             "(prefetch.seen != n - 1) | ~(found", "~(found",
             "tests/ops/gather/test_prefetch_async.py -k second_prompt"),
    Mutation("pages that took new tokens count them beside the ring", "torchsparsekv/method.py",
             "partial = self.traits.partial_blocks", "partial = False",
             "tests/ops/gather/test_prefetch_async.py -k dense"),
    Mutation("nobody waits for what is fetched late", "torchsparsekv/method.py",
             "prefetch_async(out, s.prefetch", "prefetch_async(q.clone(), s.prefetch",
             "tests/ops/gather/test_prefetch_async.py -k before_the_next_layer"),
    # ---- store
    Mutation("a packed number is cut off, not rounded", "ops/store/rows.py", ".round().to(PACKED)", ".to(PACKED)",
             "tests/ops/store/test_packed_pool.py::test_unpacked_numbers_are_within_half_a_step"),
    Mutation("the kernel packs a value by the scales of its key", "ops/store/rows.py",
             "return c // D * ((D + GROUP - 1) // GROUP) + c % D // GROUP", "return c % D // GROUP",
             "tests/ops/store/test_packed_pool.py::test_triton_packs_and_unpacks_like_torch"),
    Mutation("the hot buffer gets the unrounded token, the packed pool the rounded one", "ops/icecache/share_step.py",
             "values = store_row(row_at(", "store_row(row_at(",
             "tests/ops/store/test_packed_pool.py::test_kernel_equals_reference -k share_step"),
    Mutation("the reference leaves the copy in slot 0 as it was", "ops/icecache/share_step.py",
             "    if slot >= 0:", "    if slot > 0:",
             "tests/ops/icecache/test_hot_copies.py -k reference"),
    Mutation("the kernel leaves the copy in slot 0 as it was", "ops/icecache/share_step.py",
             "mask=m & (slot >= 0)[:, None]", "mask=m & (slot > 0)[:, None]",
             "tests/ops/icecache/test_hot_copies.py -k share_step-triton"),
    Mutation("an inserted page leaves the copy in slot 0 as it was", "ops/icecache/insert_page.py",
             "(hot_slot >= 0)", "(hot_slot > 0)",
             "tests/ops/icecache/test_hot_copies.py -k insert_page-triton"),
    # ---- select
    Mutation("the sample of nodes is those first in number", "ops/icecache/visit_nodes.py",
             "u = 1 + i * apart", "u = 1 + i",
             "tests/ops/icecache/test_visit_nodes.py::test_best_nodes_of_many_are_expanded"),
    Mutation("as few nodes are expanded as before", "torchsparsekv/_methods/icecache.py",
             "MANY_NODES, BUDGETS = 0.1, 640, 8", "MANY_NODES, BUDGETS = 0.1, 512, 8",
             "tests/methods/test_icecache.py::test_numbers_of_expanded_nodes_are_pinned"),
    Mutation("of a sample as many nodes are expanded as of all", "ops/icecache/visit_nodes.py",
             "rank = torch.where(room < count, (room + apart - 1) // apart, nodes)",
             "rank = torch.where(room < count, room, nodes)",
             "tests/ops/icecache/test_visit_nodes.py::test_number_of_expanded_nodes_is_met_in_the_mean"),
    Mutation("what is as good as the last node is not expanded", "ops/icecache/page_peaks.py",
             "(product >= threshold)", "(product > threshold)",
             "tests/ops/icecache/test_page_peaks.py::test_kernel_equals_reference_with_several_programs_per_head"),
    Mutation("children of the root are not seen", "ops/icecache/page_peaks.py",
             "tl.where((mark < min_nodes) | (product", "tl.where((mark < 0) | (product",
             "tests/ops/icecache/test_page_peaks.py::test_kernel_equals_reference_with_several_programs_per_head"),
    Mutation("children of the first nodes are seen like others", "ops/icecache/page_peaks.py",
             "tl.where((mark < min_nodes) | (product", "tl.where((mark <= 0) | (product",
             "tests/ops/icecache/test_page_peaks.py::test_kernel_equals_reference_with_several_programs_per_head"),
    Mutation("ties go to the higher block", "ops/select/top_blocks.py",
             STABLE, "(n - 1 - scores.flip(-1).argsort(dim=-1, descending=True, stable=True))[..., : min(k, n)]",
             "tests/ops/select/test_top_blocks.py"),
    Mutation("a unit that does not fit is left out, not trimmed", "ops/clusters/pick_units.py",
             ROOM, "room = torch.where((end - begin).cumsum(0) <= budget, end - begin, 0)",
             "tests/methods/test_clusters.py::test_whole_units_are_taken_until_the_budget_is_full"),
    Mutation("candidates are ranked by the mean of the heads", "ops/pariskv/rerank.py",
             "estimate = estimate.amax(-1).masked", "estimate = estimate.mean(-1).masked",
             "tests/methods/test_pariskv.py::test_chosen_tokens_are_the_best_estimates_among_the_candidates"),
    Mutation("a page counts for the sum of the heads", "ops/select/bound_scores.py",
             "origin[..., None]).amax(2)", "origin[..., None]).sum(2)",
             "tests/methods/test_methods.py::test_quest_chooses_by_its_definition"),
    Mutation("a group chooses by its first query", "torchsparsekv/_methods/_pages.py",
             "(digests.centre.shape[1], -1)).mean(2)", "(digests.centre.shape[1], -1))[:, :, 0]",
             "tests/methods/test_methods.py::test_a_group_of_heads_may_choose_by_its_mean_query"),
    Mutation("a mean key has the spread of a ball", "ops/index/block_bounds.py",
             "return centre, torch.zeros_like(x[..., 0, :1])",
             "return centre, (x - centre.float().unsqueeze(-2)).norm(dim=-1).amax(-1, keepdim=True)",
             "tests/methods/test_methods.py::test_pagemean_by_the_largest_score_of_a_head"),
    Mutation("the kernel gives a mean key the spread of a ball", "ops/index/block_bounds.py", "if BALL == 2:",
             "if BALL == 3:", "tests/ops/_machinery/test_ops.py::test_kernel_equals_reference[block_bounds-triton]"),
    Mutation("the newest candidate of stage one is lost", "ops/pariskv/rank_by_votes.py",
             "ids = ids_of_row(codes.ids, table, b, sink, end).transpose(1, 2).long()",
             "ids = ids_of_row(codes.ids, table, b, sink, end - 1).transpose(1, 2).long()",
             "tests/methods/test_pariskv.py::test_rows_below_the_dense_threshold_take_everything"),
    # ---- rows that share one pool
    Mutation("keys that are not there are counted", "ops/pariskv/count_ids.py",
             "count -= tl.where(c == 0, dead, 0)", "count -= 0",
             "tests/ops/_machinery/test_ops.py::test_kernel_equals_reference[count_ids-triton]"),
    Mutation("counts of a block's earlier use are taken", "ops/pariskv/encode_tokens.py",
             "uses[0, begun] += 1", "uses[0, begun] += 0",
             "tests/ops/pariskv/test_count_ids.py::test_a_block_given_to_another_request_is_counted_anew[reference]"),
    Mutation("counts of another request are taken", "ops/pariskv/count_ids.py",
             "same = block == counted.blocks[at] and", "same =",
             "tests/ops/pariskv/test_count_ids.py::test_a_row_given_to_another_request_is_counted_anew[reference]"),
    Mutation("engine rest: the sums of a block are too small", "ops/engine/filled_sums.py", "tokens.sum(1) / size",
             "tokens.sum(1) / (size + 1)", ENGINE_RESTS),
    Mutation("engine rest: the kernel takes tokens of another block for new ones", "ops/engine/filled_sums.py",
             "((tl.load(to + tl.maximum(token, 0)) == row) & (token >= 0))",
             "(tl.load(to + tl.maximum(token, 0)) >= 0)", FILLED_SUMS),
    Mutation("engine rest: sums are not made", "torchsparsekv/engines/_blocks.py",
             "            filled_sums(k, v, to, layer.store.pool, layer.rest)\n", "            pass\n", ENGINE_RESTS),
    Mutation("engine rest: selected tokens count twice", BLOCK_REST,
             "tokens[b, h] -= torch.bincount(of, minlength=tokens.shape[2])", "pass", ENGINE_RESTS),
    Mutation("engine rest: selected tokens stay in the sums", BLOCK_REST, "alpha=-1", "alpha=0", ENGINE_RESTS),
    Mutation("engine rest: a mean counts as one token", LISTED, "tokens.clamp(min=1).float().log()",
             "tokens.clamp(min=1).float() * 0", ENGINE_RESTS),
    Mutation("engine rest: the kernel counts the sinks", BLOCK_REST,
             "tl.maximum(tl.minimum((at + 1) * GROUP, end) - tl.maximum(at * GROUP, sink), 0)",
             "tl.maximum(tl.minimum((at + 1) * GROUP, end) - at * GROUP, 0)", LISTED_KERNELS),
    Mutation("engine rest: the kernel looks selected units up at the front of the list", LISTED, "ids + bh * n + n - k",
             "ids + bh * n", LISTED_KERNELS),
    Mutation("engine rest: programs begin with the wrong tile of groups", LISTED,
             "first = (split - tiles % splits + splits) % splits", "first = split + 1", LISTED_KERNELS),
    Mutation("engine rest: small blocks are groups by default", "torchsparsekv/engines/_options.py",
             "whole and block_size >= LEAST_REST", "whole",
             "tests/ops/engine/test_engine_blocks.py::test_groups_of_the_rest_are_the_blocks_of_the_engine"),
    Mutation("a pool that just fits the device lies in host memory", "torchsparsekv/engines/_blocks.py",
             "self.slots = units <= slots,", "self.slots = units < slots,",
             "tests/ops/engine/test_engine_blocks.py::test_device_with_room_for_all_blocks_holds_the_pool"),
    Mutation("blocks that are all there are not marked as used", "ops/engine/fetch_shared.py",
             "        tl.store(hot.used + h * slots + slot, tl.full((PART,), 1, tl.int32), mask=slot >= 0)\n", "",
             "tests/ops/engine/test_fetch_shared.py::test_blocks_that_are_all_there_are_marked_as_used"),
    Mutation("the last interval of a request is in two places", "ops/engine/tables.py",
             "(groups * interval + sink)", "(groups * interval + sink + interval)",
             "tests/ops/engine/test_engine_blocks.py::test_random_requests_equal_brute_force[device-quest]"),
    Mutation("a prompt does not go to the device", "torchsparsekv/engines/_blocks.py",
             "if self.resident and not self.whole:\n            self._admit", "if False:\n            self._admit",
             "tests/ops/engine/test_engine_blocks.py::test_blocks_stay_on_the_device_until_it_is_full"),
    # ---- choices of tokens
    Mutation("heads choose by the sum of their logits", "ops/select/softmax_scores.py",
             "weight = inside - total", "weight = inside",
             "tests/methods/test_pqcache.py::test_heads_of_a_group_choose_by_the_sum_of_their_softmaxes"),
    Mutation("k-means does not see the ring", "ops/pqcache/learn_codebook.py",
             "sink, max(n, sink))", "sink, max(new, sink))",
             "tests/methods/test_pqcache.py::test_keys_in_the_ring_are_learned_from[reference]"),
    Mutation("nor does it on a device", "ops/pqcache/learn_codebook.py",
             "(lengths.length - lengths.sink)", "(lengths.ring_begin - lengths.sink)",
             "tests/methods/test_pqcache.py::test_keys_in_the_ring_are_learned_from[triton]"),
    Mutation("a long prompt is learned from its first keys", "ops/pqcache/learn_codebook.py",
             "torch.arange(taken) * keys.shape[1] // taken]", "torch.arange(taken)]",
             "tests/methods/test_pqcache.py::test_long_prompt_learns_from_keys_at_equal_distances[reference]"),
    Mutation("all parts of a key have the products of the first part", "ops/pqcache/code_logits.py",
             "tables + (bh * SPACES + s) * C * G + code", "tables + bh * SPACES * C * G + code",
             "tests/ops/_machinery/test_ops.py::test_kernel_equals_reference[code_logits-triton]"),
    Mutation("one hit is enough", "ops/magicpig/find_collisions.py",
             "return (hits < 2).sum(1)", "return (hits < 1).sum(1)",
             "tests/methods/test_magicpig.py::test_choice_equals_the_definition_of_the_paper"),
    Mutation("a step uses a table too many", "ops/magicpig/find_collisions.py",
             "cumsum(0) <= budget).sum())", "cumsum(0) <= budget + 1).sum())",
             "tests/methods/test_magicpig.py::test_choice_equals_the_definition_of_the_paper"),
    Mutation("keys are hashed from 0", "ops/magicpig/_planes.py", "y, size = y - centre @ plane,", "y, size = y,",
             "tests/methods/test_magicpig.py::test_keys_with_a_large_mean_are_told_apart[reference]"),
    Mutation("the chance of two hits is that of one", "ops/magicpig/sample_bias.py",
             "- tables * one * torch.exp(", "- 0 * one * torch.exp(",
             "tests/methods/test_magicpig.py::test_chance_is_that_of_two_hits_or_more"),
    Mutation("a head attends to the samples of its group", "ops/magicpig/sample_bias.py",
             "torch.where(hits >= 2, bias, -torch.inf)", "torch.where(hits >= 0, bias, -torch.inf)",
             "tests/methods/test_magicpig.py::test_output_equals_the_weighed_softmax_of_the_sample[reference]"),
    Mutation("the kernel leaves the weights of a sample out", "ops/attend/sparse_attention.py",
             "acc, scale, softcap, D, DP, bias)", "acc, scale, softcap, D, DP)",
             "tests/methods/test_magicpig.py::test_output_equals_the_weighed_softmax_of_the_sample[triton]"),
    Mutation("heads choose chunks by the sum of their softmaxes", "torchsparsekv/_methods/shadowkv.py",
             "softmax_scores(logits, heads, True)", "softmax_scores(logits, heads, False)",
             "tests/methods/test_shadowkv.py::test_choice_equals_the_definition_of_the_paper"),
    Mutation("outliers are the chunks that are most alike", "ops/shadowkv/mark_outliers.py",
             "ranked(cosines.masked_fill(", "ranked((-cosines).masked_fill(",
             "tests/methods/test_shadowkv.py::test_choice_equals_the_definition_of_the_paper"),
    Mutation("an outlier is known by its mean cosine", "ops/shadowkv/keep_landmarks.py", "/ size).amin(-1)",
             "/ size).mean(-1)", "tests/methods/test_shadowkv.py::test_choice_equals_the_definition_of_the_paper"),
    Mutation("a query of SnapKV's window sees the next token", SNAP, "device=z.device) > position[:, None]",
             "device=z.device) > position[:, None] + 1", PAPERS),
    Mutation("SnapKV's softmax leaves its window out", SNAP, ".softmax(-1)[..., :end]", "[..., :end].softmax(-1)",
             PAPERS),
    Mutation("SnapKV's mean at an edge is of fewer", SNAP, "else F.avg_pool1d",
             "else lambda *x: F.avg_pool1d(*x, count_include_pad=False)", PAPERS),
    Mutation("SnapKV takes the largest vote of a group", SNAP, ".sum((0, 1))", ".sum(0).amax(0)", CHUNKS),
    Mutation("SnapKV's past in several slices is the first one", SNAP, "end + i * some, keys", "end, keys",
             "tests/methods/test_snapkv.py::test_slices_of_logits_give_the_same_votes"),
    Mutation("SnapKV forgets the queries of steps", "torchsparsekv/_methods/_static.py",
             "return s.observed.queries", "return None", CHUNKS),
    Mutation("SnapKV attends to what is in the ring by chance", "torchsparsekv/_methods/snapkv.py",
             "s.kept.updated, s.kept.frontier)", "s.kept.updated)",
             "tests/methods/test_snapkv.py::test_step_attends_to_exactly_the_kept_tokens"),
    Mutation("a turn before the first token is taken for never", "ops/prkv/choose_static.py",
             "at == NOT_YET or", "at < 0 or",
             "tests/methods/test_static_models.py::test_layers_update_at_different_steps"),
    Mutation("so it is in the kernel", "ops/prkv/choose_static.py", "((chosen_at == NOT_SINCE)", "((chosen_at < 0)",
             "tests/ops/prkv/test_choose_static.py::test_update_due_before_the_first_token_still_happens"),
    Mutation("the newest query is the one before it", "ops/prkv/static_target.py", "- window, 0), n - 1)",
             "- window, 0), n - 2)",
             "tests/ops/prkv/test_choose_static.py::test_target_uses_the_first_and_the_last_query"),
    Mutation("a score that is no number leaves a hole", "ops/prkv/choose_static.py", "mass, 0.0)", "mass, mass)",
             "tests/ops/prkv/test_choose_static.py::test_nan_score_leaves_no_hole_in_the_set"),
    Mutation("queries beyond fp16 are infinite", "ops/prkv/choose_static.py",
             "tl.clamp(x.to(tl.float32), -FP16_MAX, FP16_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)",
             "x.to(tl.float16)", "tests/ops/prkv/test_choose_static.py::test_nan_score_leaves_no_hole_in_the_set"),
    Mutation("what a step chose before is moved again", "ops/prkv/choose_static.py",
             "(was_updated != due", "(was_updated == due",
             "tests/ops/_machinery/test_ops.py::test_kernel_equals_reference -k update_static_set"),
    Mutation("a set is chosen and does not move", "ops/prkv/update_static_set.py", "LAST - MOVING, M)", "0, M)",
             "tests/ops/_machinery/test_ops.py::test_kernel_equals_reference -k update_static_set"),
    Mutation("what leaves in a step of prkv is not summarised", "ops/prkv/update_static_set.py",
             "if FIRST < 1:", "if FIRST < 0:",
             "tests/ops/_machinery/test_ops.py::test_kernel_equals_reference -k update_static_set"),
    Mutation("an automatic share is found without what just left", "torchsparsekv/_methods/prkv.py",
             'if not self.static or self.static_ratio == "auto":', "if not self.static:",
             "tests/methods/test_static.py::test_block_that_leaves_at_the_first_step_counts_for_the_share"),
    Mutation("static pages are scored like others", "ops/select/bound_scores.py",
             "        if PINNED:", "        if PINNED and P > 4096:",
             "tests/ops/select/test_bound_scores.py::test_pinned_blocks_score_above_all_others"),
    Mutation("keys that leave are not copied", "ops/index/block_bounds.py", "if COPY:", "if COPY and D > 4096:",
             "tests/ops/_machinery/test_ops.py::test_kernel_equals_reference -k block_bounds"),
    Mutation("a block gets its digest once too seldom", "ops/prkv/relocate.py",
             "(tl.load(row - 1) // C.block_size != block)", "(tl.load(row - 1) // C.block_size == block)",
             "tests/ops/_machinery/test_ops.py::test_kernel_equals_reference -k relocate"),
    Mutation("a row that the hot buffer lacks is not written to the pool", "ops/prkv/relocate.py",
             "((held_one == 0) | (", "((held_one != 0) & (",
             "tests/ops/_machinery/test_ops.py::test_kernel_equals_reference -k relocate"),
    Mutation("a row goes to the pool and not to the hot buffer", "ops/prkv/relocate.py",
             "tl.store(hot_two, x, mask=m & held_two)", "tl.store(pool_two, x, mask=m & held_two)",
             "tests/ops/_machinery/test_ops.py::test_kernel_equals_reference -k relocate"),
    Mutation("the hot buffer keeps what was there before", "ops/prkv/relocate.py",
             "hot.rows[b, h, slot] = rows[every]", "pass",
             "tests/methods/test_static.py::test_no_token_is_lost_over_a_hundred_updates"),
    Mutation("scores are of logits that are not scaled", "ops/prkv/choose_static.py",
             "_exp2(z * factor - log_sum[None, :], C)", "_exp2(z - log_sum[None, :], C)",
             "tests/ops/prkv/test_choose_static.py::test_sinks_over_several_tiles_equal_reference"),
    Mutation("a giant prompt's queries are found by 32 bits", "ops/index/observe.py",
             "(tokens - n + position).to(tl.int64)", "(tokens - n + position)",
             "tests/ops/_machinery/test_large.py::test_observe_of_a_huge_prompt"),
    Mutation("the kernel keeps the same token twice for SnapKV", "ops/snapkv/keep_leaving.py", "frontier + i)",
             "frontier)",
             "tests/ops/_machinery/test_ops.py::test_kernel_equals_reference -k keep_leaving"),
    # ---- fetch
    Mutation("a slot in use is taken at once", "ops/gather/fetch.py",
             "if at not in skipped and not used[at]:", "if at not in skipped:",
             "tests/ops/gather/test_hot_buffer.py::test_reference_equals_the_model"),
    Mutation("a block that was overwritten is still found", "ops/gather/fetch.py",
             "            slot_of[block_of[i]] = -1\n", "            pass\n",
             "tests/ops/gather/test_hot_buffer.py::test_reference_equals_the_model"),
    Mutation("the hand passes a slot less", "ops/gather/_hot_buffer.py",
             "tl.where(taken, step + 1, 0)", "tl.where(taken, step, 0)",
             "tests/ops/gather/test_hot_buffer.py -k over_many_calls"),
    # ---- the rest
    Mutation("exact tokens stay in the sums", REMAINING, "alpha=-1)", "alpha=0)", DEFINITION + "[quest-reference]"),
    Mutation("the kernel leaves exact keys in the sums", REMAINING,
             '    keys -= tl.dot(of.to(k.dtype), k, input_precision="ieee")\n', "", DEFINITION + "[quest-triton]"),
    Mutation("one token more remains of a group", REMAINING, "(held // group, minlength=groups)",
             "(held // group, minlength=groups) + 1", DEFINITION + "[quest-reference]"),
    Mutation("the kernel counts one exact token less", REMAINING, "count - tl.sum(of.to(tl.int32), 1)",
             "count - tl.maximum(tl.sum(of.to(tl.int32), 1) - 1, 0)", DEFINITION + "[quest-triton]"),
    Mutation("a mean counts as one token", "ops/attend/sparse_attention.py", "tokens.clamp(min=1).float().log()",
             "torch.zeros_like(tokens.float())", DEFINITION + "[quest-reference]"),
    Mutation("in the kernel a mean counts as one token", "ops/attend/_split.py",
             "tl.log(tl.maximum(count, 1).to(tl.float32))", "tl.log(tl.minimum(count, 1).to(tl.float32))",
             DEFINITION + "[quest-triton]"),
    Mutation("append forgets the group that a step before began", "ops/store/append.py",
             "tl.where(part == 0, old // GROUP, tl.cdiv(first, GROUP))", "tl.cdiv(first, GROUP)", APPENDED),
    Mutation("a program of append adds up what another one did", "ops/store/append.py",
             "tl.where(part == 0, old // GROUP, tl.cdiv(first, GROUP))", "first // GROUP", APPENDED),
    Mutation("rows of one group are not added up", SUMS, 'tl.dot(same, tokens.to(tl.float32), input_precision="ieee")',
             "tokens.to(tl.float32)", ROW_SUMS),
    Mutation("all programs add the first columns of a row", SUMS,
             "tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]", "tl.arange(0, COLUMNS)[None, :]", ROW_SUMS),
    Mutation("rows are added where no token leaves", SUMS,
             "(tl.load(length + b) > 0) & (tl.load(previous_ring_begin + b) < tl.load(ring_begin + b)):\n        i, c",
             "(tl.load(length + b) > 0):\n        i, c", ROW_SUMS),
    # ---- retroinfer
    Mutation("retroinfer: the first new unit gets no mean", "ops/retroinfer/unit_means.py",
             "if old <= begin < end:", "if old < begin < end:", ESTIMATED + "[reference]"),
    Mutation("retroinfer: the kernel leaves the first new unit out", "ops/retroinfer/unit_means.py",
             "while (begin >= old) & (begin >= 0):", "while (begin > old) & (begin >= 0):", ESTIMATED + "[triton]"),
    Mutation("retroinfer: the kernel does not follow the order of a prompt", "ops/retroinfer/unit_means.py",
             "column = tl.load(order + bh * tokens + tokens - n + row, mask=new, other=0)",
             "column = (tokens - n + row)", ESTIMATED + "[triton]"),
    Mutation("retroinfer: a cut unit stands for all its tokens", "ops/retroinfer/estimate_units.py",
             "left = (end - begin)[:, 0] - (", "left = (end - begin)[:, 0] - 0 * (", ESTIMATED + "[reference]"),
    Mutation("retroinfer: one unit more is estimated", "ops/retroinfer/estimate_units.py",
             "[: count * share + ONE // 2 >> 16]", "[: (count * share + ONE // 2 >> 16) + 1]",
             ESTIMATED + "[reference]"),
    Mutation("retroinfer: the kernel estimates all units of equal rank", "ops/retroinfer/estimate_units.py",
             "(before + tl.cumsum(equal, 0) <= room)", "(room > -1)",
             "tests/ops/_machinery/test_ops.py::test_kernel_equals_reference -k estimate_units"),
    Mutation("retroinfer: the kernel counts a retrieved token as left", "ops/retroinfer/estimate_units.py",
             "left = end - begin - _before(ids, end, n, ROUNDS) + _before(ids, begin, n, ROUNDS)", "left = end - begin",
             ESTIMATED + "[triton]"),
    Mutation("retroinfer: keys are clustered with their mean", "torchsparsekv/_methods/retroinfer.py",
             "centred: ClassVar[bool] = True", "centred: ClassVar[bool] = False",
             "tests/methods/test_retroinfer.py::test_keys_are_clustered_by_cosine_without_their_mean"),
    Mutation("the kernel leaves the mean of a stretch in its keys", "ops/clusters/cluster_ring.py",
             "x.to(tl.float32) - centre[None, :], 0.0)", "x.to(tl.float32), 0.0)",
             "tests/ops/clusters/test_kmeans.py::test_tokens_leaving_the_ring_are_clustered_by_cosine"),
    Mutation("the kernels count keys that stay in the ring for the mean", "ops/clusters/_kmeans_kernels.py",
             "& (column < lengths.ring_begin[:, None])", "",
             "tests/ops/clusters/test_kmeans.py::test_clustering_kernel_by_cosine"),
    # ---- attend
    Mutation("warps of attention have two tiles where one would do", "ops/attend/_native.py",
             "rounds = cdiv(tiles, cluster * most)", "rounds = cdiv(tiles, cluster * WARPS)",
             "tests/ops/attend/test_sparse_attention.py::test_number_of_warps_follows_the_tiles"),
    Mutation("what is retrieved late is out of reach", "ops/attend/sparse_attention.py",
             "    begins = lengths.ring_begin[:, None].expand(ring.shape[:2]) if frontier is None else frontier\n",
             "    begins = lengths.ring_begin[:, None].expand(ring.shape[:2])\n",
             "tests/ops/_machinery/test_ops.py::test_kernel_equals_reference -k sparse_attention"),
    Mutation("a token of a prompt sees the next one", "ops/attend/_split.py",
             "live = torch.arange(end, device=q.device) <= position[:, None]",
             "live = torch.arange(end, device=q.device) <= position[:, None] + 1",
             "tests/methods/test_update_interval.py"),
    Mutation("a window is one token wider", "ops/attend/window_attention.py",
             "(seen > at[:, None] - window)", "(seen >= at[:, None] - window)",
             "tests/patches/test_windows.py::test_chunks_and_turns_attend_within_their_window"),
    Mutation("the kernel reads a ring row beyond the newest token", "ops/attend/sparse_attention.py",
             "(pos < tl.where(row < sink, tl.minimum(end, sink), end))",
             "(pos <= tl.where(row < sink, tl.minimum(end, sink), end))",
             "tests/ops/_machinery/test_ops.py::test_kernel_equals_reference -k sparse_attention"),
    # ---- what generate() does with a step
    Mutation("a step that waits for the host is captured", "patches/_captured.py",
             "        if sync_ops:\n            self._compile_instead",
             "        if not out:\n            self._compile_instead",
             "tests/patches/test_auto.py::test_step_that_waits_for_the_device_is_compiled"),
    Mutation("a row past its capacity goes to the pool", "ops/store/flush_ring.py",
             "tl.load(length + b) > 0", "tl.load(length + b) > -9",
             "tests/ops/_machinery/test_ops.py::test_kernel_equals_reference_in_worlds_found_by_fuzzing"),
    Mutation("hooks of transformers count as the user's", "patches/_captured.py",
             'OURS = ("torchsparsekv.", "transformers.")', 'OURS = ("torchsparsekv.",)',
             "tests/patches/test_auto.py::test_hooks_of_transformers_do_not_count_as_user_hooks"),
    Mutation("the layer that chooses for others is not rehearsed", "patches/_precompile.py",
             "layer.state.store.ring, layer.state.anchor is not None", "layer.state.store.ring, False",
             "tests/patches/test_ahead.py::test_every_op_with_a_cuda_kernel_is_compiled_ahead -k reuse"),
    Mutation("omnikv: the first heads choose for all", "ops/omnikv/filter_scores.py",
             "best = z.amax(1, keepdim=True)", "best = z[:, :1]",
             "tests/methods/test_omnikv.py::test_tokens_are_chosen_over_all_heads_by_the_definition_of_the_authors"),
    Mutation("omnikv: weights are logits", "ops/omnikv/filter_scores.py", "    if weights:", "    if weights is None:",
             "tests/methods/test_omnikv.py::test_tokens_are_chosen_over_all_heads_by_the_definition_of_the_authors"),
    Mutation("omnikv: tokens of the window are chosen", "ops/omnikv/filter_scores.py",
             "lengths.length[:, None] - window", "lengths.length[:, None]",
             "tests/methods/test_omnikv.py::test_tokens_are_chosen_over_all_heads_by_the_definition_of_the_authors"),
    Mutation("omnikv: a wait layer attends to the choice", OMNI, "> self.wait_layers", ">= self.wait_layers",
             "tests/methods/test_omnikv.py::test_filter_layers_and_the_layers_behind_them"),
    Mutation("omnikv: layers follow the first filter layer", OMNI, "                latest, had = i, heads",
             "                latest, had = (i, heads) if not found else (latest, had)",
             "tests/methods/test_omnikv.py::test_layers_attend_to_what_the_filter_layer_before_them_chose"),
    Mutation("omnikv: a filter layer never chooses", "torchsparsekv/method.py", "            if s.followers:",
             "            if not s.followers:",
             "tests/methods/test_omnikv.py::test_layers_attend_to_what_the_filter_layer_before_them_chose"),
    Mutation("h2o: the heaviest token is evicted", "ops/h2o/evict_lightest.py", "least = min(range(most)",
             "least = max(range(most)", HEAVY),
    Mutation("h2o: of equal tokens the kernel evicts the first", "ops/h2o/evict_lightest.py",
             "if tl.load(received + p) > least:", "if tl.load(received + p) >= least:",
             "tests/ops/_machinery/test_ops.py::test_kernel_equals_reference[evict_lightest-triton]"),
    Mutation("h2o: a query of a prompt sees the next token", "ops/h2o/add_prompt_attention.py",
             "later = torch.arange(end, device=z.device) >", "later = torch.arange(end, device=z.device) - 1 >", HEAVY),
    Mutation("h2o: the kernel leaves out the diagonal", "ops/h2o/add_prompt_attention.py",
             "live = (pos[:, None] <= (first + i)[None, :])", "live = (pos[:, None] < (first + i)[None, :])",
             "tests/ops/_machinery/test_ops.py::test_kernel_equals_reference[add_prompt_attention-triton]"),
    Mutation("h2o: a second turn brings evicted tokens back", "ops/h2o/add_prompt_attention.py",
             "stepped[:, None] & (place >= sink)", "~stepped[:, None] & (place < 0)",
             "tests/methods/test_h2o.py::test_an_evicted_token_never_comes_back"),
    Mutation("h2o: steps add nothing", "torchsparsekv/method.py", "            self.attended(s, q, a)\n", "", HEAVY),
    Mutation("h2o: only the window receives attention", "ops/h2o/add_attention.py",
             ".to(far.dtype), far], 2)", ".to(far.dtype), far * 0 - 1], 2)", HEAVY),
    Mutation("raas: the newest page is evicted", STAMPS, "key=lambda i: (int(stamps[ids[i]])",
             "key=lambda i: (-int(stamps[ids[i]])", ANSWER),
    Mutation("raas: pages of the prompt are like others", STAMPS,
             "stamps[p] = PROMPT if p * digests.block_size < int(pages.prompt_end[b, h]) else n", "stamps[p] = n",
             "tests/methods/test_raas.py::test_pages_of_the_prompt_stay"),
    Mutation("raas: the share is rounded down", STAMPS, "-(-held * share // MILLION)", "held * share // MILLION",
             ANSWER),
    Mutation("raas: a page of the prompt loses its stamp", STAMPS,
             "torch.where(stamps[seen] == PROMPT, PROMPT, n).int()", "n",
             "tests/methods/test_raas.py::test_pages_of_the_prompt_stay"),
    Mutation("raas: a second turn brings evicted pages back", "ops/raas/keep_prompt_pages.py",
             "(stepped & before & ~kept)", "(stepped & before & ~kept & False)",
             "tests/methods/test_raas.py::test_an_evicted_page_never_comes_back"),
    Mutation("raas: the kernel evicts the last of equal pages", STAMPS,
             "first = tl.min(tl.where((at == oldest) & (kept >= 0), kept, blocks), 0)",
             "first = tl.max(tl.where((at == oldest) & (kept >= 0), kept, -1), 0)",
             "tests/ops/_machinery/test_ops.py::test_kernel_equals_reference[stamp_pages-triton]"),
)  # fmt: skip


def mutated(m: Mutation, root: Path) -> None:
    path = root / m.file
    text = path.read_text()
    if text.count(m.old) != 1:
        raise ValueError(f"{m.name}: {m.file} has {m.old!r} {text.count(m.old)} times")
    path.write_text(text.replace(m.old, m.new))


def copied(root: Path, to: Path) -> None:
    shutil.copytree(root, to, ignore=LEFT_OUT)
    (to / "benchmarks" / "results").symlink_to(root / "benchmarks" / "results")


def fails(m: Mutation) -> bool:
    """Whether the test fails in a copy with the mistake; that it passes without is for the suite to show."""
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "copy"
        copied(ROOT, to)
        mutated(m, to)
        subprocess.run([sys.executable, str(to / "tests/tools/link.py"), str(to / "house")], check=True)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *m.test.split(" ")]
        done = subprocess.run(
            command, cwd=to, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(to / "house"), "PYTHONSAFEPATH": "1"},
        )
        if done.returncode not in (0, 1):
            said = done.stdout[-2000:] + done.stderr[-500:]
            raise RuntimeError(f"{m.name}: pytest ended with {done.returncode}\n{said}")
        return done.returncode == 1


def main() -> int:
    words = sys.argv[1:]
    wanted = [m for m in MUTATIONS if not words or any(w in m.name for w in words)]
    alive = []
    for m in wanted:
        caught = fails(m)
        print(f"{'caught' if caught else 'ALIVE':<7} {m.name}: {m.file}, by {m.test}", flush=True)
        alive += [] if caught else [m]
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
