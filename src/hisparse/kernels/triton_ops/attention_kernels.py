"""The two kernels of `attention.py`: one chunk of a selection after another, and the join of chunks.

How the bits of a result come about: a chunk is a fixed range of the selection, taken tile by tile into sums of its
own. Chunks are then joined one by one, from the first to the last, by the fused operations of `_join`. Either one
program takes them all and joins as it goes (`joins`), or programs leave their chunks in memory and `join_chunks` does
the same operations on them. So how many programs share the work changes no bit, and may follow the batch.
"""

import triton
import triton.language as tl


# Values of the batch, which would each be compiled anew where they happen to be 1 or a multiple of 16.
@triton.jit(do_not_specialize=["num_heads", "num_chunks", "chunks_per_program"])
def attend_chunks(
    query,
    rows,
    storage,
    partial,
    tops,
    totals,
    out,
    num_rows,
    num_heads,
    num_chunks,
    chunks_per_program,
    offset,
    block_stride,
    row_stride,
    scale,
    block_shift: tl.constexpr,
    lora: tl.constexpr,
    rope: tl.constexpr,
    lora_pad: tl.constexpr,
    rope_pad: tl.constexpr,
    heads: tl.constexpr,
    tile: tl.constexpr,
    chunk_rows: tl.constexpr,
    is_packed: tl.constexpr,
    converts_fp8: tl.constexpr,
    is_even: tl.constexpr,
    joins: tl.constexpr,
    precision: tl.constexpr,
):
    """A program: `heads` heads of one query, over the chunks of its share.

    `is_even`: nothing is padded, neither heads nor elements, so that only rows need a mask. With `joins`, `partial`
    is `[t, H, lora]`, the program's own notes between chunks; without, `[t, H, chunks, lora]` is what it leaves.
    """
    # Programs of one query are neighbours: they read the same rows at about the same time.
    head = tl.program_id(0) * heads + tl.arange(0, heads)
    token = tl.program_id(1).to(tl.int64)
    # Sums of all latents fill the registers. In two halves, they can be joined with what is in memory half by half.
    half: tl.constexpr = lora_pad // 2
    latent = tl.arange(0, half)[None, :]
    rotated = tl.arange(0, rope_pad)[None, :]
    has_head = head < num_heads
    in_low = latent < lora
    in_high = latent + half < lora
    in_rope = rotated < rope
    row_of_head = token * num_heads + head
    query_row = query + row_of_head[:, None] * (lora + rope)
    if is_even:
        q_low = tl.load(query_row + latent)
        q_high = tl.load(query_row + half + latent)
        q_rope = tl.load(query_row + lora + rotated)
    else:
        q_low = tl.load(query_row + latent, mask=has_head[:, None] & in_low, other=0.0)
        q_high = tl.load(query_row + half + latent, mask=has_head[:, None] & in_high, other=0.0)
        q_rope = tl.load(query_row + lora + rotated, mask=has_head[:, None] & in_rope, other=0.0)

    first_chunk = tl.program_id(2) * chunks_per_program
    last_chunk = tl.minimum(first_chunk + chunks_per_program, num_chunks)
    all_top = tl.full((heads,), float("-inf"), tl.float32)
    all_total = tl.zeros((heads,), tl.float32)
    for chunk in range(first_chunk, last_chunk):
        top = tl.full((heads,), float("-inf"), tl.float32)
        total = tl.zeros((heads,), tl.float32)
        low = tl.zeros((heads, half), tl.float32)
        high = tl.zeros((heads, half), tl.float32)
        for start in range(0, chunk_rows, tile):
            column = chunk * chunk_rows + start + tl.arange(0, tile)
            row = tl.load(rows + token * num_rows + column, mask=column < num_rows, other=-1)
            valid = row >= 0
            has_row = valid[:, None]
            # Rows of no one are read where row 0 lies, but masked: nothing is fetched.
            at = tl.where(valid, row, 0)
            block = (at >> block_shift).to(tl.int64)
            first = offset + block * block_stride + (at & ((1 << block_shift) - 1)) * row_stride
            rope_mask = has_row if is_even else has_row & in_rope
            if is_packed:
                k_low, k_high = _packed_latents(storage, first, has_row, half, tile, converts_fp8)
                k_low, k_high = k_low.to(q_low.dtype), k_high.to(q_low.dtype)
                ropes = (storage + first + lora + lora // 32).to(tl.pointer_type(tl.bfloat16))
                k_rope = tl.load(ropes[:, None] + rotated, mask=rope_mask, other=0.0).to(q_rope.dtype)
            else:
                elements = storage + first[:, None]
                k_low = tl.load(elements + latent, mask=has_row if is_even else has_row & in_low, other=0.0)
                k_high = tl.load(elements + half + latent, mask=has_row if is_even else has_row & in_high, other=0.0)
                k_rope = tl.load(elements + lora + rotated, mask=rope_mask, other=0.0)
            scores = tl.dot(q_rope, tl.trans(k_rope), input_precision=precision)
            scores = tl.dot(q_low, tl.trans(k_low), scores, input_precision=precision)
            scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision=precision) * scale
            scores = tl.where(valid[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            # Without any row so far, everything is -inf, and the difference of two of them no number.
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(scores - safe[:, None])
            shrink = tl.exp2(top - safe)
            total = tl.fma(total, shrink, tl.sum(weights, 1))
            weights = weights.to(k_low.dtype)
            low = tl.dot(weights, k_low, low * shrink[:, None], input_precision=precision)
            high = tl.dot(weights, k_high, high * shrink[:, None], input_precision=precision)
            top = new_top

        if joins:
            notes = partial + row_of_head[:, None] * lora + latent
            result = out + row_of_head[:, None] * lora + latent
            is_last = chunk + 1 == num_chunks
            shrink, next_shrink, all_top = _shrinks(all_top, top)
            all_total = tl.fma(total, next_shrink, all_total * shrink)
            low = _join_notes(low, notes, shrink, next_shrink, has_head[:, None] & in_low, chunk > 0, is_even)
            _put(low, all_total, notes, result, has_head[:, None] & in_low, is_last, is_even)
            high = _join_notes(high, notes + half, shrink, next_shrink, has_head[:, None] & in_high, chunk > 0, is_even)
            _put(high, all_total, notes + half, result + half, has_head[:, None] & in_high, is_last, is_even)
            # Another thread of the program may read the notes back.
            tl.debug_barrier()
        else:
            place = row_of_head * num_chunks + chunk
            left = partial + place[:, None] * lora + latent
            _store(left, low, has_head[:, None] & in_low, is_even)
            _store(left + half, high, has_head[:, None] & in_high, is_even)
            tl.store(tops + place, top, mask=has_head)
            tl.store(totals + place, total, mask=has_head)


@triton.jit
def _packed_latents(storage, first, has_row, half: tl.constexpr, tile: tl.constexpr, converts_fp8: tl.constexpr):
    """Both halves of the latents of `fp8_ds_mla` rows that start at `first`, float32 `[tile, half]` each."""
    latent = tl.arange(0, half)[None, :]
    group = tl.arange(0, half // 128)[None, :]
    codes = storage + first[:, None] + latent
    factors = (storage + first).to(tl.pointer_type(tl.float32))[:, None] + half * 2 // 4 + group
    low = _dequantize(tl.load(codes, mask=has_row, other=0), converts_fp8)
    low_factors = tl.load(factors, mask=has_row, other=0.0)
    high = _dequantize(tl.load(codes + half, mask=has_row, other=0), converts_fp8)
    high_factors = tl.load(factors + half // 128, mask=has_row, other=0.0)
    low = tl.reshape(low, (tile, half // 128, 128)) * low_factors[:, :, None]
    high = tl.reshape(high, (tile, half // 128, 128)) * high_factors[:, :, None]
    return tl.reshape(low, (tile, half)), tl.reshape(high, (tile, half))


@triton.jit
def _dequantize(codes, converts_fp8: tl.constexpr):
    if converts_fp8:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    # e4m3 and float16 differ in the exponent's bias by 8: the same bits, times 2^8. Any GPU can do that.
    wide = codes.to(tl.int32)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _shrinks(top, next_top):
    """What sums with the greatest scores `top` and `next_top` are multiplied with when they are joined; the greater."""
    new_top = tl.maximum(top, next_top)
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    return tl.exp2(top - safe), tl.exp2(next_top - safe), new_top


@triton.jit
def _join(before, shrink, weighted, next_shrink):
    # Fused where it is written so, and nowhere else: the compiler is left no choice that changes bits.
    wide = tl.broadcast_to(next_shrink[:, None], weighted.shape)
    return tl.fma(weighted, wide, before * shrink[:, None])


@triton.jit
def _join_notes(weighted, notes, shrink, next_shrink, mask, has_notes, is_even: tl.constexpr):
    if has_notes:
        before = tl.load(notes) if is_even else tl.load(notes, mask=mask, other=0.0)
        weighted = _join(before, shrink, weighted, next_shrink)
    return weighted


@triton.jit
def _put(weighted, total, notes, result, mask, is_last, is_even: tl.constexpr):
    if is_last:
        _store(result, _mean(weighted, total).to(result.dtype.element_ty), mask, is_even)
    else:
        _store(notes, weighted, mask, is_even)


@triton.jit
def _mean(weighted, total):
    return weighted / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _store(place, values, mask, is_even: tl.constexpr):
    if is_even:
        tl.store(place, values)
    else:
        tl.store(place, values, mask=mask)


@triton.jit(do_not_specialize=["num_chunks"])
def join_chunks(partial, tops, totals, out, num_chunks, lora: tl.constexpr, lora_pad: tl.constexpr):
    """A program: the chunks of one head of one query."""
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    latent = tl.arange(0, lora_pad)[None, :]
    is_latent = latent < lora
    one = place * num_chunks + tl.arange(0, 1)
    top = tl.load(tops + one)
    total = tl.load(totals + one)
    weighted = tl.load(partial + one[:, None] * lora + latent, mask=is_latent, other=0.0)
    for chunk in range(1, num_chunks):
        next_weighted = tl.load(partial + (one + chunk)[:, None] * lora + latent, mask=is_latent, other=0.0)
        next_top, next_total = tl.load(tops + one + chunk), tl.load(totals + one + chunk)
        shrink, next_shrink, top = _shrinks(top, next_top)
        total = tl.fma(next_total, next_shrink, total * shrink)
        weighted = _join(weighted, shrink, next_weighted, next_shrink)
    tl.store(out + place * lora + latent, _mean(weighted, total).to(out.dtype.element_ty), mask=is_latent)
