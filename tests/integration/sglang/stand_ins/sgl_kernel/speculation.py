"""What EAGLE-3 decoding calls of sgl_kernel on a CPU, in torch and plain loops: small batches, clear code, no speed."""

from __future__ import annotations

import ctypes

import torch
from torch.nn.functional import scaled_dot_product_attention


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """Each request's cache locations of the positions [start_r, end_r), one request behind the other."""
    taken = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        out_cache_loc[taken : taken + last - first] = req_to_token[row, first:last]
        taken += last - first


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, steps
):
    """The locations behind each sequence that drafting writes to: [request, path, step]."""
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, seq_lens + topk * steps, out_cache_loc, pool_len
    )


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, steps, pool_len):
    """A row of locations for each path of each request: the sequence's, then those of the path's own steps."""
    rows = torch.zeros(len(seq_lens) * topk, pool_len, dtype=req_to_token.dtype)
    for number, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        own = req_to_token[row, length : length + topk * steps].view(topk, steps)
        for path in range(topk):
            rows[number * topk + path, :length] = req_to_token[row, :length]
            rows[number * topk + path, length : length + steps] = own[path]
    return rows


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, stride):
    """The last accepted token of each request, the target's own."""
    tokens = accept_tokens.view(-1)
    for number, length in enumerate(accept_lens.tolist()):
        bonus_tokens[number] = tokens[number * stride + length - 1]


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    """The locations of the accepted tokens, in front."""
    flat = accept_index.view(-1)
    kept = flat[flat >= 0].long()
    accept_out_cache_loc[: len(kept)] = out_cache_loc[kept]


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, targets, sources):
    """Move positions of every layer's keys and values: rows of `stride` bytes in buffers that begin at `data_ptrs`."""
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + source * stride, stride) for source in sources.tolist()]
        for target, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(base + target * stride, row, stride)


def _parents(parent_list, selected, topk):
    """For each node of the tree but the root, its parent's place (the root is 0, node i stands at i + 1)."""
    places = {candidate: place for place, candidate in enumerate(selected, 1)}
    return [0 if (group := candidate // topk) == 0 else places[parent_list[group]] for candidate in selected]


def build_tree_kernel_efficient_cpu(
    parent_list, selected_index, seq_lens, tree_mask, positions, retrieve_index, next_token, next_sibling, topk, depth,
    count, mask_mode,
):  # fmt: skip
    """Who sees whom in each request's tree of `count` nodes, where they stand, and how they hang together."""
    assert int(mask_mode) == 1, "the mask of the nodes alone (QLEN_ONLY)"
    masks, places = tree_mask.view(-1, count, count), positions.view(-1, count)
    for number, length in enumerate(seq_lens.tolist()):
        parents = _parents(parent_list[number].tolist(), selected_index[number].tolist(), topk)
        sees = torch.eye(count, dtype=torch.bool)
        depths = [0] * count
        for node, parent in enumerate(parents, 1):
            sees[node] |= sees[parent]
            depths[node] = depths[parent] + 1
        masks[number] = sees
        places[number] = length + torch.tensor(depths)
        retrieve_index[number] = number * count + torch.arange(count)
        for node in range(count - 1, 0, -1):  # so that siblings hang together best first
            parent = parents[node - 1]
            next_sibling[number, node] = next_token[number, parent]
            next_token[number, parent] = node


def verify_tree_greedy_cpu(
    *, predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    target_predict,
):  # fmt: skip
    """Follow the target's own choices down each tree, as far as they were drafted; they go to `predicts`."""
    for number in range(len(candidates)):
        node = accepted = 0
        accept_index[number, 0] = retrive_index[number, 0]
        while True:
            choice = int(target_predict[number, node])
            predicts[int(retrive_index[number, node])] = choice
            child = int(retrive_next_token[number, node]) if accepted + 1 < accept_index.shape[1] else -1
            while child >= 0 and int(candidates[number, child]) != choice:
                child = int(retrive_next_sibling[number, child])
            if child < 0:
                break
            node, accepted = child, accepted + 1
            accept_index[number, accepted] = retrive_index[number, node]
        accept_token_num[number] = accepted


def _attend(query, keys, values, output, scale, mask):
    """One request: query and output [T, heads, d], keys and values [S, kv_heads, d], mask [T, S] or None."""
    found = scaled_dot_product_attention(
        query.movedim(0, 1)[None], keys.to(query.dtype).movedim(0, 1)[None], values.to(query.dtype).movedim(0, 1)[None],
        attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != keys.shape[1],
    )  # fmt: skip
    output.copy_(found[0].movedim(1, 0))


def _require_plain(logit_cap, cross, window, sinks):
    if logit_cap or cross or window > 0 or sinks is not None:
        raise NotImplementedError("the stand-in's attention knows no caps, windows, sinks or other sequences")


def extend_attention_cpu(
    q, k, v, o, k_buffer, v_buffer, k_scale, v_scale, req_to_token, req_pool_indices, seq_lens, extend_lens,
    extend_starts, longest, scale, logit_cap, cross, window, encoder_lens, sinks, tree_mask, causal,
):  # fmt: skip
    """New positions, over the sequence before them and themselves: causal, or as the tree's mask says."""
    _require_plain(logit_cap, cross, window, sinks)
    k, v = k.view(len(q), -1, k_buffer.shape[-1]), v.view(len(q), -1, v_buffer.shape[-1])
    for number, row in enumerate(req_pool_indices.tolist()):
        count, first = int(extend_lens[number]), int(extend_starts[number])
        before = req_to_token[row, : int(seq_lens[number]) - count].long()
        new = slice(first, first + count)
        if tree_mask is not None:
            own = tree_mask.view(-1, count, count)[number]
        else:
            own = torch.ones(count, count, dtype=torch.bool)
            own = own.tril() if causal else own
        mask = torch.cat([torch.ones(count, len(before), dtype=torch.bool), own], 1)
        keys, values = torch.cat([k_buffer[before], k[new]]), torch.cat([v_buffer[before], v[new]])
        _attend(q[new], keys, values, o[new], scale, mask)


def decode_attention_cpu(
    q, k_buffer, v_buffer, k_scale, v_scale, o, k, v, cache_loc, workspace, req_to_token, req_pool_indices, seq_lens,
    scale, logit_cap, cross, window, encoder_lens, sinks,
):  # fmt: skip
    """One new position a sequence: its key and value are stored first."""
    _require_plain(logit_cap, cross, window, sinks)
    if k is not None:
        k_buffer[cache_loc] = k.view(len(q), -1, k_buffer.shape[-1]).to(k_buffer.dtype)
        v_buffer[cache_loc] = v.view(len(q), -1, v_buffer.shape[-1]).to(v_buffer.dtype)
    for number, row in enumerate(req_pool_indices.tolist()):
        seen = req_to_token[row, : int(seq_lens[number])].long()
        _attend(q[number : number + 1], k_buffer[seen], v_buffer[seen], o[number : number + 1], scale, None)
