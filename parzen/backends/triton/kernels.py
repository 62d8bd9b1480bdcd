"""The device code of the Triton engine: one forward and two backward kernels for every cell of the table.

A program takes tiles of BLOCK_M queries (of BLOCK_N keys in ``backward_keys``) one after the other and
streams over the other axis. What has weight is either appended to a list per row in the program's own
scratch memory and gathered from there, or, where a tile holds much of it, multiplied as a matrix. Every
kernel makes its scores with the same product of the same tiles, so that a key that is at a threshold in one
of them is there in all. Nothing depends on the order in which programs run.
"""

import triton
import triton.language as tl

from parzen import kernels

_EXP = tl.constexpr(kernels.EXP)
_EVERYWHERE = tl.constexpr(kernels.EVERYWHERE)
_UNIT_MASS = tl.constexpr(kernels.UNIT_MASS)
_THRESHOLD = tl.constexpr(kernels.THRESHOLD)
_MARGIN = tl.constexpr(kernels.MARGIN)
_NEAREST = tl.constexpr(kernels.NEAREST)
_INF = tl.constexpr(float("inf"))
_NAN = tl.constexpr(float("nan"))
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_ALL = tl.constexpr(2**31 - 1)
_LOWEST = tl.constexpr(-3.4028234663852886e38)
# Newton stops where a step is no more than this share of σ + 1, or after so many steps.
_SETTLED = tl.constexpr(2.4e-7)
_STEPS = tl.constexpr(60)
_EARLY_STEPS = tl.constexpr(8)
# Columns of a list that are looked at together, and rows of saved numbers: m, mark, Σφ, Σa, ties, support.
_CHUNK = tl.constexpr(32)
STATS = tl.constexpr(6)
# Sums for each query: of q·ds·k, ds without what a best key carries, −ds·|distance|, and the derivative by r.
EXTRAS = tl.constexpr(4)


# ---- profiles and thresholds ---------------------------------------------------------------------


@triton.jit
def _log1p(u):
    y = 1 + u
    d = y - 1
    return tl.where(d == 0, u, tl.log(y) * (u / tl.where(d == 0, 1.0, d)))


@triton.jit
def _expm1(x):
    e = tl.exp(x)
    d = e - 1
    return tl.where(d == 0, x, d * (x / tl.where(d == 0, 1.0, tl.log(e))))


@triton.jit
def _inside(s, m, mark, level, RULE: tl.constexpr, CLOSED: tl.constexpr, r):
    """Whether scores belong to the support, or may, where m and mark are not final yet."""
    if RULE == _UNIT_MASS:
        keep = (s - m - mark) / r > -1
    elif RULE == _MARGIN:
        keep = s - m >= -level if CLOSED else s - m > -level
    elif RULE == _THRESHOLD:
        keep = s >= level if CLOSED else s > level
    elif RULE == _NEAREST:
        keep = s >= mark
    else:
        keep = s > -_INF
    return keep & (s > -_INF)


@triton.jit
def _weigh(s, m, mark, level, r, PROFILE: tl.constexpr, RULE: tl.constexpr, R: tl.constexpr):
    """(in the support?, φ relative to the best key, φ' up to a factor of the row). m is NaN in lost rows."""
    keep = _inside(s, m, mark, level, RULE, PROFILE == _EXP or R == 0, r)
    lost = m != m
    z = s - m
    if PROFILE == _EXP:
        p = tl.exp(z)
        a = p
    elif R == 0:
        p = z * 0 + 1
        a = z * 0
    else:
        if RULE == _UNIT_MASS:
            u = tl.where(keep, (z - mark) / r, 0.0)
            y = 1 + u
        else:
            y = tl.where(keep, (z + level) / level if RULE == _MARGIN else (s - level) / (m - level), 1.0)
            u = y
        if R == 1:
            p = y
            a = y * 0 + 1
        elif R == 2:
            p = y * y
            a = y
        elif R == 3:
            a = y * y
            p = a * y
        else:
            log = _log1p(u) if RULE == _UNIT_MASS else tl.log(y)
            p = tl.exp(r * log)
            a = tl.exp((r - 1) * log)
    keep = keep | (lost & (s != -_INF))
    return keep, tl.where(keep, tl.where(lost, m, p), 0.0), tl.where(keep, tl.where(lost, m, a), 0.0)


@triton.jit
def _gain(m, level, r, total, PROFILE: tl.constexpr, RULE: tl.constexpr, R: tl.constexpr):
    """The factor of the row in ds = gain·a·(dw − μ)."""
    gain = 1 / tl.where(total == 0, 1.0, total)
    if PROFILE != _EXP and R != 0:
        if RULE == _MARGIN:
            gain = gain * r / level
        elif RULE == _THRESHOLD:
            gain = gain * r / tl.where(m > level, m - level, 1.0)
    return gain


@triton.jit
def _mass(s, m, sigma, r, R: tl.constexpr):
    """Σ yʳ and Σ yʳ⁻¹ of each row, y = [1 + (s − m − σ)/r]₊."""
    u = (s - m[:, None] - sigma[:, None]) / r[:, None]
    keep = u > -1
    u = tl.where(keep, u, 0.0)
    if R == 1:
        p = 1 + u
        a = u * 0 + 1
    elif R == 2:
        a = 1 + u
        p = a * a
    elif R == 3:
        a = (1 + u) * (1 + u)
        p = a * (1 + u)
    else:
        log = _log1p(u)
        p = tl.exp(r[:, None] * log)
        a = tl.exp((r[:, None] - 1) * log)
    return tl.sum(tl.where(keep, p, 0.0), 1), tl.sum(tl.where(keep, a, 0.0), 1)


@triton.jit
def _newton(mass, slope, r, R: tl.constexpr):
    """The step of σ on the r-norm of the row, nearly linear in σ; from the left, so never too far."""
    some = mass > 0
    mass = tl.where(some, mass, 1.0)
    if R == 1:
        step = mass - 1
    elif R == 2:
        step = 2 * (mass - tl.sqrt(mass))
    else:
        step = -r * mass * _expm1(-tl.log(mass) / r)
    return tl.where(some, tl.maximum(step / tl.where(some, slope, 1.0), 0.0), 0.0)


@triton.jit
def _ordered(s):
    """Integers in the order of the scores, −0 like 0; its own inverse on the bits."""
    bits = tl.where(s == 0, 0.0, s).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _candidate(low, n):
    """The n-th number to try for the k-th largest, bit after bit."""
    bit = tl.full(low.shape, 1, tl.int32) << tl.maximum(31 - n, 0)
    return tl.where(n == 0, 0, low + tl.where(n == 0, 0, bit))


@triton.jit
def _score_of(order):
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _dot(a, b):
    if _INTERPRETED:
        # The interpreter would multiply the bits of bfloat16 as integers.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


# ---- tiles ---------------------------------------------------------------------------------------


@triton.jit
def _load(ptr, rows, n, stride, E: tl.constexpr, E_PAD: tl.constexpr):
    e = tl.arange(0, E_PAD)
    mask = (rows < n)[:, None]
    if E != E_PAD:
        mask = mask & (e < E)[None, :]
    return tl.load(ptr + rows.to(tl.int64)[:, None] * stride + e[None, :], mask=mask, other=0.0)


@triton.jit
def _store(ptr, x, line, inside, E: tl.constexpr, E_PAD: tl.constexpr):
    e = tl.arange(0, E_PAD)
    mask = inside[:, None] & (e < E)[None, :]
    tl.store(ptr + line[:, None] * E + e[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _finite(x):
    # ∞ − ∞ and NaN − NaN are not 0.
    y = x.to(tl.float32)
    return tl.max((y - y != 0).to(tl.int32)) == 0


@triton.jit
def _row(ptr, line, inside, number, AT: tl.constexpr):
    """A number for each row: read, or the same for all."""
    if AT:
        return tl.load(ptr + line, mask=inside, other=1.0)
    return tl.zeros(line.shape, tl.float32) + number


@triton.jit
def _scores(
    q, k, scale, rows, cols, T, S, diagonal, left, right, slope, mask, mask_t, mask_s, bias, bias_t, bias_s,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOPE: tl.constexpr,
):  # fmt: skip
    """The tile of scores, −∞ where a key is not allowed."""
    s = _dot(q, tl.trans(k)) * scale[:, None]
    ahead = cols[None, :] - (rows[:, None] + diagonal)
    allowed = (rows < T)[:, None] & (cols < S)[None, :]
    allowed = allowed & (ahead >= tl.where(left < 0, -_ALL, -left))
    allowed = allowed & (ahead <= tl.where(right < 0, _ALL, right))
    i = rows.to(tl.int64)[:, None]
    j = cols.to(tl.int64)[None, :]
    if HAS_MASK:
        allowed = allowed & (tl.load(mask + i * mask_t + j * mask_s, mask=allowed, other=0) != 0)
    if HAS_BIAS:
        extra = tl.load(bias + i * bias_t + j * bias_s, mask=allowed, other=0.0).to(tl.float32)
        s = s + extra
        allowed = allowed & (extra != -_INF)
    if HAS_SLOPE:
        s = s - slope * tl.abs(ahead).to(tl.float32)
    return tl.where(allowed, s, -_INF)


@triton.jit
def _span(first, n, diagonal, left, right, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Where the part of an axis of length n that a tile of the other one can see begins and ends."""
    begin = tl.where(left < 0, 0, tl.maximum(first + diagonal - left, 0))
    end = tl.where(right < 0, n, tl.minimum(tl.maximum(first + BLOCK + diagonal + right, 0), n))
    return begin // STEP * STEP, end


@triton.jit
def _sequence(pair, H, T, S, diagonal, cu_q, cu_k, PACKED: tl.constexpr, LOWER_RIGHT: tl.constexpr):
    """Batch, head, first row of queries and of keys, their numbers, and the diagonal."""
    b = pair // H
    h = pair % H
    if PACKED:
        q0 = tl.load(cu_q + b)
        k0 = tl.load(cu_k + b)
        n = (tl.load(cu_q + b + 1) - q0).to(tl.int32)
        keys = (tl.load(cu_k + b + 1) - k0).to(tl.int32)
        if LOWER_RIGHT:
            return (b * 0).to(tl.int64), h.to(tl.int64), q0, k0, n, keys, diagonal + keys - n
        return (b * 0).to(tl.int64), h.to(tl.int64), q0, k0, n, keys, diagonal
    zero = (b * 0).to(tl.int64)
    return b.to(tl.int64), h.to(tl.int64), zero, zero, T, S, diagonal


# ---- lists ---------------------------------------------------------------------------------------


@triton.jit
def _append(lists, base, count, keep, s, place, AXIS: tl.constexpr):
    """The entries of a tile at the ends of the lists of its rows (AXIS 1) or columns (0), in order."""
    n = keep.to(tl.int32)
    other: tl.constexpr = 1 - AXIS
    at = tl.expand_dims(base, AXIS) + (tl.cumsum(n, AXIS) - n + tl.expand_dims(count, AXIS))
    # An entry: the place in the upper half, the bits of the score in the lower one.
    bits = s.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.store(lists + at, (tl.expand_dims(place, other).to(tl.int64) << 32) | bits, mask=keep)
    return count + tl.sum(n, AXIS)


@triton.jit
def _score(entry):
    return entry.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _listed(lists, base, count, first):
    """A chunk of the scores of lists, −∞ past their ends."""
    c = first + tl.arange(0, _CHUNK)
    live = c[None, :] < count[:, None]
    return tl.where(live, _score(tl.load(lists + base[:, None] + c[None, :], mask=live, other=0)), -_INF)


@triton.jit
def _entry(lists, base, count, c):
    """(score, place) of the c-th entry of each list, (−∞, 0) past its end."""
    live = c < count
    entry = tl.load(lists + base + c, mask=live, other=0)
    return tl.where(live, _score(entry), -_INF), (entry >> 32).to(tl.int32)


@triton.jit
def _list_sigma(lists, base, count, m, sigma, r, steps, R: tl.constexpr):
    """σ of the listed keys, at most ``steps`` steps from the one given; each is a lower bound."""
    most = tl.max(count)
    n = 0
    go = most > 0
    while go:
        mass = tl.zeros(m.shape, tl.float32)
        slope = tl.zeros(m.shape, tl.float32)
        for first in range(0, most, _CHUNK):
            more, steeper = _mass(_listed(lists, base, count, first), m, sigma, r, R)
            mass += more
            slope += steeper
        step = _newton(mass, slope, r, R)
        sigma += step
        n += 1
        go = (tl.max(step - _SETTLED * (1 + sigma)) > 0) & (n < steps)
    return sigma


@triton.jit
def _list_kth(lists, base, count, nearest):
    """The k-th largest listed score of each row, −∞ where there are fewer."""
    most = tl.max(count)
    low = tl.full(count.shape, -(2**31), tl.int32)
    for n in range(32):
        trial = _candidate(low, n)
        above = tl.zeros(count.shape, tl.int32)
        for first in range(0, most, _CHUNK):
            s = _listed(lists, base, count, first)
            above += tl.sum(((_ordered(s) >= trial[:, None]) & (s > -_INF)).to(tl.int32), 1)
        low = tl.where(above >= nearest, trial, low)
    return tl.where(count >= nearest, _score_of(low), -_INF)


@triton.jit
def _sieve(lists, base, count, m, mark, level, r, RULE: tl.constexpr, CLOSED: tl.constexpr):
    """The lists without what fell out of reach, in order; how many are left."""
    left = tl.zeros(count.shape, tl.int32)
    for first in range(0, tl.max(count), _CHUNK):
        s = _listed(lists, base, count, first)
        keep = _inside(s, m[:, None], mark[:, None], level[:, None], RULE, CLOSED, r[:, None])
        at = base[:, None] + (first + tl.arange(0, _CHUNK))[None, :]
        entry = tl.load(lists + at, mask=keep, other=0)
        n = keep.to(tl.int32)
        to = base[:, None] + (tl.cumsum(n, 1) - n + left[:, None])
        # No thread may overwrite what another has yet to read.
        tl.debug_barrier()
        tl.store(lists + to, entry, mask=keep)
        left += tl.sum(n, 1)
    tl.debug_barrier()
    return left


@triton.jit
def _list_average(
    lists, base, count, m, mark, level, r, v, v_s, acc, other,
    PROFILE: tl.constexpr, RULE: tl.constexpr, R: tl.constexpr, EV: tl.constexpr, EV_PAD: tl.constexpr,
    SECOND: tl.constexpr,
):  # fmt: skip
    """acc + Σ φ v, and other + Σ a v, over the lists."""
    tl.debug_barrier()
    ev = tl.arange(0, EV_PAD)
    for c in range(0, tl.max(count)):
        s, j = _entry(lists, base, count, c)
        keep, p, a = _weigh(s, m, mark, level, r, PROFILE, RULE, R)
        seen = keep[:, None] & (ev < EV)[None, :]
        x = tl.load(v + j.to(tl.int64)[:, None] * v_s + ev[None, :], mask=seen, other=0.0).to(tl.float32)
        acc += p[:, None] * x
        if SECOND:
            other += a[:, None] * x
    tl.debug_barrier()
    return acc, other


# ---- forward -------------------------------------------------------------------------------------

# What a compiled kernel does not depend on, not even on whether it is 1 or a multiple of 16.
_RUNTIME = [
    "H", "GROUPS", "T", "S", "rows", "key_rows", "tiles", "work", "live_n", "diagonal", "left", "right",
    "nearest",
]  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME)
def forward(
    q_ptr, k_ptr, v_ptr, mask_ptr, bias_ptr, slope_ptr, scale_ptr, level_ptr, r_ptr, cu_q, cu_k,
    o_ptr, mean_ptr, other_ptr, stats_ptr, lists_ptr, live_ptr,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s,
    mask_b, mask_h, mask_t, mask_s, bias_b, bias_h, bias_t, bias_s,
    H, GROUPS, T, S, rows, tiles, work, live_n, diagonal, left, right, scale_all, level_all, r_all, nearest,
    PROFILE: tl.constexpr, RULE: tl.constexpr, R: tl.constexpr, SCALE_AT: tl.constexpr,
    LEVEL_AT: tl.constexpr, R_AT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SLOPE: tl.constexpr, PACKED: tl.constexpr, LOWER_RIGHT: tl.constexpr, SAVE: tl.constexpr,
    LISTS: tl.constexpr,
    E: tl.constexpr, EV: tl.constexpr, E_PAD: tl.constexpr, EV_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAPACITY: tl.constexpr, CROWD: tl.constexpr,
):  # fmt: skip
    """o, and what backward needs.

    LISTS: try them. CAPACITY: entries of one; CROWD: of a row of a tile that is not yet multiplied.
    """
    closed: tl.constexpr = PROFILE == _EXP or R == 0
    smooth: tl.constexpr = RULE == _MARGIN and not closed
    second: tl.constexpr = SAVE and (RULE == _UNIT_MASS or smooth)
    place = tl.program_id(0).to(tl.int64)
    lists = lists_ptr + place * BLOCK_M * CAPACITY
    base = tl.arange(0, BLOCK_M) * CAPACITY
    live_at = live_ptr + place * live_n
    for piece in range(tl.program_id(0), work, tl.num_programs(0)):
        # Under a causal mask the last tiles are the longest: they come first.
        i0 = (tiles - 1 - piece % tiles) * BLOCK_M
        b, h, q0, k0, n, keys, corner = _sequence(
            piece // tiles, H, T, S, diagonal, cu_q, cu_k, PACKED, LOWER_RIGHT
        )
        keys = tl.where(i0 < n, keys, 0)
        i = i0 + tl.arange(0, BLOCK_M)
        real = i < n
        line = (b * H + h) * rows + q0 + i
        q = _load(q_ptr + b * q_b + h * q_h + q0 * q_t, i, n, q_t, E, E_PAD)
        k_at = k_ptr + b * k_b + (h // GROUPS) * k_h + k0 * k_s
        v_at = v_ptr + b * v_b + (h // GROUPS) * v_h + k0 * v_s
        mask = mask_ptr + b * mask_b + h * mask_h
        bias = bias_ptr + b * bias_b + h * bias_h
        slope = tl.load(slope_ptr + piece // tiles) if HAS_SLOPE else 0.0
        scale = _row(scale_ptr, line, real, scale_all, SCALE_AT)
        level = tl.maximum(_row(level_ptr, line, real, level_all, LEVEL_AT), _LOWEST)
        r = _row(r_ptr, line, real, r_all, R_AT)
        begin, end = _span(i0, keys, corner, left, right, BLOCK_M, BLOCK_N)

        # One pass: the maximum, a rising lower bound of the threshold, and the lists of what lies above it.
        m = tl.full([BLOCK_M], -_INF, tl.float32)
        mark = tl.zeros([BLOCK_M], tl.float32)
        if RULE == _NEAREST:
            mark = mark - _INF
        count = tl.zeros([BLOCK_M], tl.int32)
        bad = tl.zeros([BLOCK_M], tl.int32)
        over = begin * 0 + (0 if LISTS else 1)
        for j0 in range(begin, end, BLOCK_N):
            j = j0 + tl.arange(0, BLOCK_N)
            k = _load(k_at, j, keys, k_s, E, E_PAD)
            s = _scores(
                q, k, scale, i, j, n, keys, corner, left, right, slope, mask, mask_t, mask_s, bias, bias_t,
                bias_s, HAS_MASK, HAS_BIAS, HAS_SLOPE,
            )  # fmt: skip
            wrong = (s != s) | (s == _INF)
            bad = tl.maximum(bad, tl.max(wrong.to(tl.int32), 1))
            s = tl.where(wrong, -_INF, s)
            top = tl.maximum(m, tl.max(s, 1))
            if RULE == _UNIT_MASS:
                mark = tl.maximum(mark - tl.where(m == -_INF, 0.0, top - tl.where(m == -_INF, 0.0, m)), 0.0)
            m = top
            if LISTS:
                if over == 0:
                    # A row without a key yet has no candidates in this tile either.
                    high = tl.where(m == -_INF, 0.0, m)
                    keep = _inside(
                        s, high[:, None], mark[:, None], level[:, None], RULE, closed, r[:, None]
                    )  # fmt: skip
                    if tl.max(count + tl.sum(keep.to(tl.int32), 1)) > CAPACITY:
                        tl.debug_barrier()
                        if RULE == _UNIT_MASS:
                            mark = _list_sigma(lists, base, count, high, mark, r, _EARLY_STEPS, R)
                        elif RULE == _NEAREST:
                            mark = tl.maximum(mark, _list_kth(lists, base, count, nearest))
                        count = _sieve(lists, base, count, high, mark, level, r, RULE, closed)
                        keep = _inside(
                            s, high[:, None], mark[:, None], level[:, None], RULE, closed, r[:, None]
                        )  # fmt: skip
                    if tl.max(count + tl.sum(keep.to(tl.int32), 1)) > CAPACITY:
                        over = over + 1
                    else:
                        count = _append(lists, base, count, keep, s, j, 1)
        m = tl.where(m == -_INF, 0.0, m)
        tl.debug_barrier()

        # The threshold itself.
        if RULE == _UNIT_MASS or RULE == _NEAREST:
            if over == 0:
                if RULE == _UNIT_MASS:
                    mark = _list_sigma(lists, base, count, m, mark, r, _STEPS, R)
                else:
                    mark = tl.maximum(mark, _list_kth(lists, base, count, nearest))
            else:
                # Steps over all tiles; those below every threshold are left out from then on.
                low = tl.full([BLOCK_M], -(2**31), tl.int32)
                allowed = tl.zeros([BLOCK_M], tl.int32)
                turn = 0
                go = begin < end
                while go:
                    mass = tl.zeros([BLOCK_M], tl.float32)
                    slope_ = tl.zeros([BLOCK_M], tl.float32)
                    above = tl.zeros([BLOCK_M], tl.int32)
                    trial = _candidate(low, turn)
                    for j0 in range(begin, end, BLOCK_N):
                        alive = turn == 0
                        if turn > 0:
                            alive = tl.load(live_at + j0 // BLOCK_N) != 0
                        if alive:
                            j = j0 + tl.arange(0, BLOCK_N)
                            k = _load(k_at, j, keys, k_s, E, E_PAD)
                            s = _scores(
                                q, k, scale, i, j, n, keys, corner, left, right, slope, mask, mask_t, mask_s,
                                bias, bias_t, bias_s, HAS_MASK, HAS_BIAS, HAS_SLOPE,
                            )  # fmt: skip
                            s = tl.where((s != s) | (s == _INF), -_INF, s)
                            if RULE == _UNIT_MASS:
                                more, steeper = _mass(s, m, mark, r, R)
                                mass += more
                                slope_ += steeper
                                some = tl.max(steeper) > 0
                            else:
                                known = s > -_INF
                                above += tl.sum(((_ordered(s) >= trial[:, None]) & known).to(tl.int32), 1)
                                if turn == 0:
                                    allowed += tl.sum(known.to(tl.int32), 1)
                                some = tl.max((s >= mark[:, None]).to(tl.int32)) > 0
                            tl.store(live_at + j0 // BLOCK_N, some.to(tl.int8))
                    if RULE == _UNIT_MASS:
                        step = _newton(mass, slope_, r, R)
                        mark += step
                        go = (tl.max(step - _SETTLED * (1 + mark)) > 0) & (turn < _STEPS)
                    else:
                        low = tl.where(above >= nearest, trial, low)
                        go = turn < 31
                    turn += 1
                    tl.debug_barrier()
                if RULE == _NEAREST:
                    mark = tl.where(allowed >= nearest, _score_of(low), -_INF)

        # Weights and averages.
        lost = bad != 0
        m = tl.where(lost, _NAN, m)
        total = tl.zeros([BLOCK_M], tl.float32)
        slopes = tl.zeros([BLOCK_M], tl.float32)
        ties = tl.zeros([BLOCK_M], tl.float32)
        support = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, EV_PAD], tl.float32)
        other = tl.zeros([BLOCK_M, EV_PAD if second else 1], tl.float32)
        if over == 0:
            for first in range(0, tl.max(count), _CHUNK):
                s = _listed(lists, base, count, first)
                keep, p, a = _weigh(
                    s, m[:, None], mark[:, None], level[:, None], r[:, None], PROFILE, RULE, R
                )  # fmt: skip
                total += tl.sum(p, 1)
                slopes += tl.sum(a, 1)
                ties += tl.sum((s == m[:, None]).to(tl.float32), 1)
                support += tl.sum(keep.to(tl.float32), 1)
        # Again until the keys are through: fill lists and multiply crowded tiles, then empty the lists. With
        # lists from above there is nothing to fill.
        j0 = end
        if over != 0:
            j0 = begin
            count = count * 0
        go = begin < end
        while go:
            room = True
            while (j0 < end) & room:
                alive = True
                if RULE == _UNIT_MASS or RULE == _NEAREST:
                    alive = tl.load(live_at + j0 // BLOCK_N) != 0
                if alive:
                    j = j0 + tl.arange(0, BLOCK_N)
                    k = _load(k_at, j, keys, k_s, E, E_PAD)
                    s = _scores(
                        q, k, scale, i, j, n, keys, corner, left, right, slope, mask, mask_t, mask_s, bias,
                        bias_t, bias_s, HAS_MASK, HAS_BIAS, HAS_SLOPE,
                    )  # fmt: skip
                    keep, p, a = _weigh(
                        s, m[:, None], mark[:, None], level[:, None], r[:, None], PROFILE, RULE, R
                    )  # fmt: skip
                    fresh = tl.sum(keep.to(tl.int32), 1)
                    v = _load(v_at, j, keys, v_s, EV, EV_PAD)
                    # 0·∞ must stay 0: such values are taken one by one.
                    crowded = (tl.max(fresh) > CROWD) & _finite(v)
                    room = crowded | (tl.max(count + fresh) <= CAPACITY)
                    if room:
                        total += tl.sum(p, 1)
                        slopes += tl.sum(a, 1)
                        ties += tl.sum((s == m[:, None]).to(tl.float32), 1)
                        support += fresh
                        if crowded:
                            acc += _dot(p.to(v.dtype), v)
                            if second:
                                other += _dot(a.to(v.dtype), v)
                        else:
                            count = _append(lists, base, count, keep, s, j, 1)
                if room:
                    j0 += BLOCK_N
            acc, other = _list_average(
                lists, base, count, m, mark, level, r, v_at, v_s, acc, other,
                PROFILE, RULE, R, EV, EV_PAD, second,
            )  # fmt: skip
            count = count * 0
            go = j0 < end
        acc = acc / tl.where(total == 0, 1.0, total)[:, None]
        acc = tl.where(lost[:, None], _NAN, acc)
        _store(o_ptr, acc, line, real, EV, EV_PAD)
        if SAVE:
            if RULE != _UNIT_MASS:
                _store(mean_ptr, acc, line, real, EV, EV_PAD)
            if second:
                _store(other_ptr, other / tl.where(slopes == 0, 1.0, slopes)[:, None], line, real, EV, EV_PAD)
            stat = stats_ptr + line * STATS
            tl.store(stat, m, mask=real)
            tl.store(stat + 1, mark, mask=real)
            tl.store(stat + 2, tl.where(lost, _NAN, total), mask=real)
            tl.store(stat + 3, slopes, mask=real)
            tl.store(stat + 4, ties, mask=real)
            tl.store(stat + 5, support, mask=real)


# ---- backward ------------------------------------------------------------------------------------


@triton.jit
def _saved(stats_ptr, mu_ptr, push_ptr, line, inside, PUSH: tl.constexpr):
    """m, mark, Σφ, μ and Σ ds / ties of rows."""
    stat = stats_ptr + line * STATS
    m = tl.load(stat, mask=inside, other=0.0)
    mark = tl.load(stat + 1, mask=inside, other=0.0)
    total = tl.load(stat + 2, mask=inside, other=0.0)
    mu = tl.load(mu_ptr + line, mask=inside, other=0.0)
    push = tl.load(push_ptr + line, mask=inside, other=0.0) if PUSH else m * 0
    return m, mark, total, mu, push


@triton.jit
def _slope(s, m, a, dw, mu, push, keep, PUSH: tl.constexpr):
    """ds up to the gain of the row; under a margin the best keys carry the threshold."""
    ds = a * (dw - mu)
    if PUSH:
        ds = ds - tl.where(s == m, push, 0.0)
    return tl.where(keep, ds, 0.0)


@triton.jit
def _curvature(u):
    """log y − 1 + 1/y at y = 1 + u, by its series where the terms cancel."""
    series = u * 0
    for n in tl.static_range(10, 1, -1):
        series = (1 - 2 * (n % 2)) * (n - 1) / n + u * series
    safe = tl.where(u > -1, 1 + u, 1.0)
    return tl.where(tl.abs(u) < 0.1, u * u * series, tl.log(safe) - u / safe)


@triton.jit
def _sums(ds, p, s, m, mark, r, dw, mu, keep, ahead, SLOPES: tl.constexpr, BY_R: tl.constexpr):
    """−ds·|distance|, and the part of the derivative by r that each weight has."""
    far = -ds * tl.abs(ahead).to(tl.float32) if SLOPES else ds * 0
    by_r = ds * 0
    if BY_R:
        by_r = tl.where(keep, p * _curvature((s - m - mark) / r) * (dw - mu), 0.0)
    return far, by_r


@triton.jit
def _list_dq(
    lists, base, count, i, corner, m, mark, level, r, mu, push, gain, g, k, k_s, v, v_s, dense,
    acc, pushed, far, by_r,
    PROFILE: tl.constexpr, RULE: tl.constexpr, R: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    EV: tl.constexpr, EV_PAD: tl.constexpr, PUSH: tl.constexpr, SLOPES: tl.constexpr, BY_R: tl.constexpr,
    DENSE: tl.constexpr,
):  # fmt: skip
    tl.debug_barrier()
    e = tl.arange(0, E_PAD)
    ev = tl.arange(0, EV_PAD)
    for c in range(0, tl.max(count)):
        s, j = _entry(lists, base, count, c)
        at = j.to(tl.int64)[:, None]
        keep, p, a = _weigh(s, m, mark, level, r, PROFILE, RULE, R)
        x = tl.load(v + at * v_s + ev[None, :], mask=keep[:, None] & (ev < EV)[None, :], other=0.0)
        dw = tl.sum(g.to(tl.float32) * x.to(tl.float32), 1)
        ds = _slope(s, m, a, dw, mu, push, keep, PUSH)
        y = tl.load(k + at * k_s + e[None, :], mask=keep[:, None] & (e < E)[None, :], other=0.0)
        # A step has no slope, not even times ∞.
        acc += tl.where((ds != 0)[:, None], ds[:, None] * y.to(tl.float32), 0.0)
        pushed += tl.where(keep, a * (dw - mu), 0.0)
        more, other = _sums(ds, p, s, m, mark, r, dw, mu, keep, j - (i + corner), SLOPES, BY_R)
        far += more
        by_r += other
        if DENSE:
            tl.store(dense + j, ds * gain, mask=keep)
    tl.debug_barrier()
    return acc, pushed, far, by_r


@triton.jit(do_not_specialize=_RUNTIME)
def backward_queries(
    q_ptr, k_ptr, v_ptr, mask_ptr, bias_ptr, slope_ptr, scale_ptr, level_ptr, r_ptr, cu_q, cu_k,
    do_ptr, stats_ptr, mu_ptr, push_ptr, dq_ptr, extra_ptr, dense_ptr, lists_ptr,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s,
    mask_b, mask_h, mask_t, mask_s, bias_b, bias_h, bias_t, bias_s,
    H, GROUPS, T, S, rows, tiles, work, diagonal, left, right, scale_all, level_all, r_all,
    PROFILE: tl.constexpr, RULE: tl.constexpr, R: tl.constexpr, SCALE_AT: tl.constexpr,
    LEVEL_AT: tl.constexpr, R_AT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SLOPE: tl.constexpr, PACKED: tl.constexpr, LOWER_RIGHT: tl.constexpr,
    SLOPES: tl.constexpr, BY_R: tl.constexpr, DENSE: tl.constexpr,
    E: tl.constexpr, EV: tl.constexpr, E_PAD: tl.constexpr, EV_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAPACITY: tl.constexpr, CROWD: tl.constexpr,
):  # fmt: skip
    """dq, and for each query the sums that scale, level, slope and r need; with DENSE ds itself."""
    smooth: tl.constexpr = RULE == _MARGIN and PROFILE != _EXP and R != 0
    lists = lists_ptr + tl.program_id(0).to(tl.int64) * BLOCK_M * CAPACITY
    base = tl.arange(0, BLOCK_M) * CAPACITY
    for piece in range(tl.program_id(0), work, tl.num_programs(0)):
        i0 = (tiles - 1 - piece % tiles) * BLOCK_M
        b, h, q0, k0, n, keys, corner = _sequence(
            piece // tiles, H, T, S, diagonal, cu_q, cu_k, PACKED, LOWER_RIGHT
        )
        keys = tl.where(i0 < n, keys, 0)
        i = i0 + tl.arange(0, BLOCK_M)
        real = i < n
        line = (b * H + h) * rows + q0 + i
        q = _load(q_ptr + b * q_b + h * q_h + q0 * q_t, i, n, q_t, E, E_PAD)
        g = _load(do_ptr + ((b * H + h) * rows + q0) * EV, i, n, EV, EV, EV_PAD)
        k_at = k_ptr + b * k_b + (h // GROUPS) * k_h + k0 * k_s
        v_at = v_ptr + b * v_b + (h // GROUPS) * v_h + k0 * v_s
        mask = mask_ptr + b * mask_b + h * mask_h
        bias = bias_ptr + b * bias_b + h * bias_h
        slope = tl.load(slope_ptr + piece // tiles) if HAS_SLOPE else 0.0
        scale = _row(scale_ptr, line, real, scale_all, SCALE_AT)
        level = tl.maximum(_row(level_ptr, line, real, level_all, LEVEL_AT), _LOWEST)
        r = _row(r_ptr, line, real, r_all, R_AT)
        m, mark, total, mu, push = _saved(stats_ptr, mu_ptr, push_ptr, line, real, smooth)
        gain = _gain(m, level, r, total, PROFILE, RULE, R)
        dense = dense_ptr + line * S if DENSE else line
        begin, end = _span(i0, keys, corner, left, right, BLOCK_M, BLOCK_N)
        acc = tl.zeros([BLOCK_M, E_PAD], tl.float32)
        pushed = tl.zeros([BLOCK_M], tl.float32)
        far = tl.zeros([BLOCK_M], tl.float32)
        by_r = tl.zeros([BLOCK_M], tl.float32)
        count = tl.zeros([BLOCK_M], tl.int32)
        j0 = begin
        go = begin < end
        while go:
            room = True
            while (j0 < end) & room:
                j = j0 + tl.arange(0, BLOCK_N)
                k = _load(k_at, j, keys, k_s, E, E_PAD)
                s = _scores(
                    q, k, scale, i, j, n, keys, corner, left, right, slope, mask, mask_t, mask_s, bias,
                    bias_t, bias_s, HAS_MASK, HAS_BIAS, HAS_SLOPE,
                )  # fmt: skip
                keep, p, a = _weigh(
                    s, m[:, None], mark[:, None], level[:, None], r[:, None], PROFILE, RULE, R
                )  # fmt: skip
                fresh = tl.sum(keep.to(tl.int32), 1)
                if tl.max(fresh) > 0:
                    crowded = (tl.max(fresh) > CROWD) & _finite(k)
                    if crowded:
                        v = _load(v_at, j, keys, v_s, EV, EV_PAD)
                        dw = _dot(g, tl.trans(v))
                        ds = _slope(s, m[:, None], a, dw, mu[:, None], push[:, None], keep, smooth)
                        acc += _dot(ds.to(k.dtype), k)
                        pushed += tl.sum(tl.where(keep, a * (dw - mu[:, None]), 0.0), 1)
                        if SLOPES or BY_R:
                            more, other = _sums(
                                ds, p, s, m[:, None], mark[:, None], r[:, None], dw, mu[:, None], keep,
                                j[None, :] - (i + corner)[:, None], SLOPES, BY_R,
                            )  # fmt: skip
                            far += tl.sum(more, 1)
                            by_r += tl.sum(other, 1)
                        if DENSE:
                            tl.store(dense[:, None] + j[None, :], ds * gain[:, None], mask=keep)
                    else:
                        room = tl.max(count + fresh) <= CAPACITY
                        if room:
                            count = _append(lists, base, count, keep, s, j, 1)
                if room:
                    j0 += BLOCK_N
            acc, pushed, far, by_r = _list_dq(
                lists, base, count, i, corner, m, mark, level, r, mu, push, gain, g, k_at, k_s, v_at, v_s,
                dense, acc, pushed, far, by_r,
                PROFILE, RULE, R, E, E_PAD, EV, EV_PAD, smooth, SLOPES, BY_R, DENSE,
            )  # fmt: skip
            count = count * 0
            go = j0 < end
        acc = acc * gain[:, None]
        _store(dq_ptr, acc * scale[:, None], line, real, E, E_PAD)
        extra = extra_ptr + line * EXTRAS
        # A query of ∞ with gradient 0 has no part in the scale's.
        tl.store(extra, tl.sum(tl.where(acc == 0, 0.0, acc * q.to(tl.float32)), 1), mask=real)
        tl.store(extra + 1, pushed * gain, mask=real)
        tl.store(extra + 2, far * gain, mask=real)
        tl.store(extra + 3, by_r / tl.where(total == 0, 1.0, total), mask=real)


@triton.jit
def _list_dkv(
    lists, base, count, line0, scale_ptr, scale_all, level_ptr, level_all, r_ptr, r_all,
    stats_ptr, mu_ptr, push_ptr, q, q_t, do, v, dk, dv,
    PROFILE: tl.constexpr, RULE: tl.constexpr, R: tl.constexpr, SCALE_AT: tl.constexpr,
    LEVEL_AT: tl.constexpr, R_AT: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    EV: tl.constexpr, EV_PAD: tl.constexpr, PUSH: tl.constexpr,
):  # fmt: skip
    tl.debug_barrier()
    e = tl.arange(0, E_PAD)
    ev = tl.arange(0, EV_PAD)
    for c in range(0, tl.max(count)):
        live = c < count
        s, i = _entry(lists, base, count, c)
        i = i.to(tl.int64)
        line = line0 + i
        scale = _row(scale_ptr, line, live, scale_all, SCALE_AT)
        level = tl.maximum(_row(level_ptr, line, live, level_all, LEVEL_AT), _LOWEST)
        r = _row(r_ptr, line, live, r_all, R_AT)
        m, mark, total, mu, push = _saved(stats_ptr, mu_ptr, push_ptr, line, live, PUSH)
        keep, p, a = _weigh(s, m, mark, level, r, PROFILE, RULE, R)
        g = tl.load(do + i[:, None] * EV + ev[None, :], mask=keep[:, None] & (ev < EV)[None, :], other=0.0)
        g = g.to(tl.float32)
        dv += (p / tl.where(total == 0, 1.0, total))[:, None] * g
        if PROFILE == _EXP or R != 0:
            dw = tl.sum(g * v.to(tl.float32), 1)
            ds = _slope(s, m, a, dw, mu, push, keep, PUSH)
            ds = ds * _gain(m, level, r, total, PROFILE, RULE, R) * scale
            y = tl.load(q + i[:, None] * q_t + e[None, :], mask=keep[:, None] & (e < E)[None, :], other=0.0)
            dk += tl.where((ds != 0)[:, None], ds[:, None] * y.to(tl.float32), 0.0)
    tl.debug_barrier()
    return dk, dv


@triton.jit(do_not_specialize=_RUNTIME)
def backward_keys(
    q_ptr, k_ptr, v_ptr, mask_ptr, bias_ptr, slope_ptr, scale_ptr, level_ptr, r_ptr, cu_q, cu_k,
    do_ptr, stats_ptr, mu_ptr, push_ptr, dk_ptr, dv_ptr, lists_ptr,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s,
    mask_b, mask_h, mask_t, mask_s, bias_b, bias_h, bias_t, bias_s,
    H, GROUPS, T, S, rows, key_rows, tiles, work, diagonal, left, right, scale_all, level_all, r_all,
    PROFILE: tl.constexpr, RULE: tl.constexpr, R: tl.constexpr, SCALE_AT: tl.constexpr,
    LEVEL_AT: tl.constexpr, R_AT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SLOPE: tl.constexpr, PACKED: tl.constexpr, LOWER_RIGHT: tl.constexpr,
    E: tl.constexpr, EV: tl.constexpr, E_PAD: tl.constexpr, EV_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAPACITY: tl.constexpr, CROWD: tl.constexpr,
):  # fmt: skip
    """dk and dv: the lists are those of the keys, of the queries that see them."""
    smooth: tl.constexpr = RULE == _MARGIN and PROFILE != _EXP and R != 0
    lists = lists_ptr + tl.program_id(0).to(tl.int64) * BLOCK_N * CAPACITY
    base = tl.arange(0, BLOCK_N) * CAPACITY
    heads = H // GROUPS
    for piece in range(tl.program_id(0), work, tl.num_programs(0)):
        j0 = (piece % tiles) * BLOCK_N
        b, hk, q0, k0, n, keys, corner = _sequence(
            piece // tiles, heads, T, S, diagonal, cu_q, cu_k, PACKED, LOWER_RIGHT
        )
        n_seen = tl.where(j0 < keys, n, 0)
        j = j0 + tl.arange(0, BLOCK_N)
        k = _load(k_ptr + b * k_b + hk * k_h + k0 * k_s, j, keys, k_s, E, E_PAD)
        v = _load(v_ptr + b * v_b + hk * v_h + k0 * v_s, j, keys, v_s, EV, EV_PAD)
        dk = tl.zeros([BLOCK_N, E_PAD], tl.float32)
        dv = tl.zeros([BLOCK_N, EV_PAD], tl.float32)
        begin, end = _span(j0, n_seen, -corner, right, left, BLOCK_N, BLOCK_M)
        for h in range(hk * GROUPS, hk * GROUPS + GROUPS):
            line0 = (b * H + h) * rows + q0
            q_at = q_ptr + b * q_b + h * q_h + q0 * q_t
            do_at = do_ptr + line0 * EV
            mask = mask_ptr + b * mask_b + h * mask_h
            bias = bias_ptr + b * bias_b + h * bias_h
            slope = tl.load(slope_ptr + piece // tiles // heads * H + h) if HAS_SLOPE else 0.0
            count = tl.zeros([BLOCK_N], tl.int32)
            i0 = begin
            go = begin < end
            while go:
                room = True
                while (i0 < end) & room:
                    i = i0 + tl.arange(0, BLOCK_M)
                    real = i < n
                    line = line0 + i
                    scale = _row(scale_ptr, line, real, scale_all, SCALE_AT)
                    level = tl.maximum(_row(level_ptr, line, real, level_all, LEVEL_AT), _LOWEST)
                    r = _row(r_ptr, line, real, r_all, R_AT)
                    m, mark, total, mu, push = _saved(stats_ptr, mu_ptr, push_ptr, line, real, smooth)
                    q = _load(q_at, i, n, q_t, E, E_PAD)
                    s = _scores(
                        q, k, scale, i, j, n, keys, corner, left, right, slope, mask, mask_t, mask_s, bias,
                        bias_t, bias_s, HAS_MASK, HAS_BIAS, HAS_SLOPE,
                    )  # fmt: skip
                    keep, p, a = _weigh(
                        s, m[:, None], mark[:, None], level[:, None], r[:, None], PROFILE, RULE, R
                    )  # fmt: skip
                    fresh = tl.sum(keep.to(tl.int32), 0)
                    if tl.max(fresh) > 0:
                        g = _load(do_at, i, n, EV, EV, EV_PAD)
                        crowded = (tl.max(fresh) > CROWD) & _finite(q) & _finite(g)
                        if crowded:
                            # Sums of lost rows are NaN, and 0·NaN must stay 0.
                            w = tl.where(keep, p / tl.where(total == 0, 1.0, total)[:, None], 0.0)
                            dv += _dot(tl.trans(w.to(g.dtype)), g)
                            if PROFILE == _EXP or R != 0:
                                dw = _dot(g, tl.trans(v))
                                ds = _slope(s, m[:, None], a, dw, mu[:, None], push[:, None], keep, smooth)
                                gain = _gain(m, level, r, total, PROFILE, RULE, R) * scale
                                ds = tl.where(keep, ds * gain[:, None], 0.0)
                                dk += _dot(tl.trans(ds.to(q.dtype)), q)
                        else:
                            room = tl.max(count + fresh) <= CAPACITY
                            if room:
                                count = _append(lists, base, count, keep, s, i, 0)
                    if room:
                        i0 += BLOCK_M
                dk, dv = _list_dkv(
                    lists, base, count, line0, scale_ptr, scale_all, level_ptr, level_all, r_ptr, r_all,
                    stats_ptr, mu_ptr, push_ptr, q_at, q_t, do_at, v, dk, dv, PROFILE, RULE, R, SCALE_AT,
                    LEVEL_AT, R_AT, E, E_PAD, EV, EV_PAD, smooth,
                )  # fmt: skip
                count = count * 0
                go = i0 < end
        line = (b * heads + hk) * key_rows + k0 + j
        _store(dk_ptr, dk, line, j < keys, E, E_PAD)
        _store(dv_ptr, dv, line, j < keys, EV, EV_PAD)
