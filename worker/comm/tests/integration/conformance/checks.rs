//! The checks of collectives that every transport must pass. Each check compares a collective with
//! a brute-force computation that knows the values of all ranks.
use comm::Comm;
use device::{Buf, Dtype};
use std::fmt;

/// The failure of a check: a result that differs from the brute-force computation, or an error of a
/// collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CheckFailure {
    /// Name of the failed check.
    pub(crate) check: String,
    /// Description of the difference, or the error of the collective.
    pub(crate) detail: String,
}

impl fmt::Display for CheckFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.check, self.detail)
    }
}

/// Creates the failure which reports that the check `check` found a wrong result. `detail`
/// describes the difference.
pub(crate) fn make_failure(check: &str, detail: impl Into<String>) -> CheckFailure {
    CheckFailure { check: check.to_owned(), detail: detail.into() }
}

/// A random number generator (splitmix64). Ranks with the same seed draw the same collectives.
#[derive(Clone)]
pub(crate) struct Rng(u64);

impl Rng {
    /// Returns the next random number of 64 bits.
    fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Returns a random number below `n`.
    fn next_below(&mut self, n: usize) -> usize {
        (self.next_u64() % n as u64) as usize
    }

    /// Draws a random length of at most `max`, which is often 0 or tiny.
    fn draw_len(&mut self, max: usize) -> usize {
        match self.next_below(5) {
            0 => 0,
            1 => self.next_below(4).min(max),
            2 => max - self.next_below(3).min(max),
            _ => self.next_below(max + 1),
        }
    }

    /// Draws a random length of at most `max` for each of `world` ranks; often all are equal.
    fn draw_counts(&mut self, world: usize, max: usize) -> Vec<usize> {
        match self.next_below(4) {
            0 => vec![self.draw_len(max); world],
            _ => (0..world).map(|_| self.draw_len(max)).collect(),
        }
    }
}

/// Computes element `i` of the test tensor with the number `id` on the rank `rank`. Magnitudes
/// differ strongly, so that another order of a sum gives other bits.
fn compute_value(id: u64, rank: usize, i: usize) -> f32 {
    let h = Rng(id ^ (rank as u64) << 40 ^ (i as u64) << 8).next_u64();
    let scale = [1.0, 1e-5, 1e5, -1e5][(h & 3) as usize];
    (1.0 + (h >> 40) as f32 / (1u64 << 24) as f32) * scale
}

/// Creates the test tensor with the number `id` of the rank `rank`, with `len` values from
/// [`compute_value`].
fn make_tensor(id: u64, rank: usize, len: usize) -> Buf {
    Buf::from_slice(&(0..len).map(|i| compute_value(id, rank, i)).collect::<Vec<_>>())
}

/// Sums values of consecutive ranks in the order of the fixed tree, with a binary counter. This is
/// the expected result of reductions.
fn compute_tree_sum(values: impl Iterator<Item = f32>) -> f32 {
    let mut stack: Vec<(usize, f32)> = Vec::new();
    for v in values {
        let mut top = (1, v);
        while stack.last().is_some_and(|s| s.0 == top.0) {
            let left = stack.pop().expect("the stack is not empty");
            top = (2 * top.0, left.1 + top.1);
        }
        stack.push(top);
    }
    stack.into_iter().rev().map(|s| s.1).reduce(|right, left| left + right).expect("at least one rank")
}

/// Fails if the bits of an element of `actual` differ from those of `expected`. `what` names the
/// collective in the failure.
fn check_equal(
    what: &str,
    actual: &[f32],
    expected: impl ExactSizeIterator<Item = f32>,
) -> Result<(), CheckFailure> {
    if actual.len() != expected.len() {
        return Err(make_failure(what, format!("{} elements, not {}", actual.len(), expected.len())));
    }
    for (i, (a, e)) in actual.iter().zip(expected).enumerate() {
        if a.to_bits() != e.to_bits() {
            return Err(make_failure(what, format!("element {i} of {} is {a}, not {e}", actual.len())));
        }
    }
    Ok(())
}

/// Returns a function that converts an error of the collective `what` to a failure.
fn to_named_failure(what: &'static str) -> impl Fn(comm::CommError) -> CheckFailure {
    move |e| make_failure(what, e.to_string())
}

/// Computes the index of the first element of each rank's part: the prefix sums of `counts`.
fn compute_offsets(counts: &[usize]) -> Vec<usize> {
    (0..counts.len()).map(|r| counts[..r].iter().sum()).collect()
}

/// Runs and checks `steps` collectives that are drawn from `seed`, with parts of at most `max`
/// elements. The first nine are one of each kind.
pub(crate) fn check_random_collectives(
    comm: &dyn Comm,
    seed: u64,
    steps: usize,
    max: usize,
) -> Result<(), CheckFailure> {
    let mut rng = Rng(seed);
    for step in 0..steps {
        let id = rng.next_u64();
        let kind = if step < 9 { step } else { rng.next_below(9) };
        check_random_collective(comm, kind, id, &mut rng, max).map_err(|e| {
            let check = format!("rank {} of {}, step {step}, {}", comm.rank(), comm.world_size(), e.check);
            CheckFailure { check, ..e }
        })?;
    }
    Ok(())
}

/// Runs one collective of the given kind with arguments drawn from `rng`, and checks its result.
fn check_random_collective(
    comm: &dyn Comm,
    kind: usize,
    id: u64,
    rng: &mut Rng,
    max: usize,
) -> Result<(), CheckFailure> {
    match kind {
        0 => check_all_gather(comm, id, &rng.draw_counts(comm.world_size(), max)),
        1 => {
            let counts = rng.draw_counts(comm.world_size(), max);
            let partials: Vec<usize> = (0..comm.world_size()).map(|_| rng.next_below(4)).collect();
            check_reduce_scatter_ordered(comm, id, &counts, &partials)
        }
        2 => check_reduce_scatter(comm, id, &rng.draw_counts(comm.world_size(), max)),
        3 => check_all_reduce(comm, id, rng.draw_len(max * 2)),
        4 => check_broadcast(comm, id, rng.draw_len(max * 2), rng.next_below(comm.world_size())),
        5 => {
            let world = comm.world_size();
            let matrix: Vec<Vec<usize>> = (0..world).map(|_| rng.draw_counts(world, max)).collect();
            check_all_to_all(comm, id, &matrix)
        }
        6 => check_all_gather_bytes(comm, id, &rng.draw_counts(comm.world_size(), max * 4)),
        7 => check_shared_window(comm, id, &rng.draw_counts(comm.world_size(), max)),
        _ => comm.barrier().map_err(to_named_failure("barrier")),
    }
}

/// Checks all-gathers of `f32` elements and of elements of two bytes.
pub(crate) fn check_all_gather(comm: &dyn Comm, id: u64, counts: &[usize]) -> Result<(), CheckFailure> {
    let total: usize = counts.iter().sum();
    let mut recv = Buf::from_slice(&vec![f32::NAN; total]);
    let send = make_tensor(id, comm.rank(), counts[comm.rank()]);
    comm.all_gather(recv.view_mut(), send.view(), counts).map_err(to_named_failure("all_gather"))?;
    let expected: Vec<f32> =
        counts.iter().enumerate().flat_map(|(r, &n)| (0..n).map(move |i| compute_value(id, r, i))).collect();
    check_equal("all_gather", recv.host_slice(), expected.into_iter())?;
    check_all_gather_of_halves(comm, id, counts)
}

/// Checks an all-gather of elements of two bytes against the bits of all ranks.
fn check_all_gather_of_halves(comm: &dyn Comm, id: u64, counts: &[usize]) -> Result<(), CheckFailure> {
    let bits = |r: usize| (0..counts[r]).map(move |i| compute_value(id, r, i).to_bits() as u16);
    let send = make_half_tensor(&bits(comm.rank()).collect::<Vec<_>>());
    let mut recv = Buf::zeroed_as(Dtype::Bf16, counts.iter().sum());
    comm.all_gather(recv.view_mut(), send.view(), counts)
        .map_err(to_named_failure("all_gather of halves"))?;
    check_equal_halves("all_gather", &recv, (0..comm.world_size()).flat_map(bits))
}

/// Creates a buffer of bf16 elements with these bits.
fn make_half_tensor(bits: &[u16]) -> Buf {
    let mut buf = Buf::zeroed_as(Dtype::Bf16, bits.len());
    buf.view_mut().half_bits().copy_from_slice(bits);
    buf
}

/// Fails if the bits of a two-byte element of `actual` differ from those in `expected`. `what`
/// names the collective in the failure.
fn check_equal_halves(
    what: &str,
    actual: &Buf,
    expected: impl Iterator<Item = u16>,
) -> Result<(), CheckFailure> {
    let is_equal = actual.view().half_bits().iter().copied().eq(expected);
    if is_equal { Ok(()) } else { Err(make_failure(what, "other bits of halves")) }
}

/// Checks a reduce-scatter that delivers the pieces of all ranks separately, in a fixed order (an
/// ordered reduce-scatter). Rank r passes `partials[r]` partial vectors.
pub(crate) fn check_reduce_scatter_ordered(
    comm: &dyn Comm,
    id: u64,
    counts: &[usize],
    partials: &[usize],
) -> Result<(), CheckFailure> {
    let total = counts.iter().sum();
    let me = comm.rank();
    let partial_id = |i: usize| id.wrapping_add(i as u64);
    let mine: Vec<Buf> = (0..partials[me]).map(|i| make_tensor(partial_id(i), me, total)).collect();
    let views: Vec<_> = mine.iter().map(Buf::view).collect();
    let mut delivered = Vec::new();
    let start = compute_offsets(counts)[me];
    let mut result = Ok(());
    comm.reduce_scatter_ordered(&views, partials, counts, &mut |rank, i, piece| {
        delivered.push((rank, i));
        if result.is_ok() {
            let expected: Vec<f32> =
                (start..start + counts[me]).map(|k| compute_value(partial_id(i), rank, k)).collect();
            result = check_equal(&format!("piece ({rank}, {i})"), piece.host_slice(), expected.into_iter());
        }
    })
    .map_err(to_named_failure("reduce_scatter_ordered"))?;
    result?;
    let order: Vec<_> = partials.iter().enumerate().flat_map(|(r, &n)| (0..n).map(move |i| (r, i))).collect();
    if delivered != order {
        let detail = format!("pieces were delivered as {delivered:?}, not as {order:?}");
        return Err(make_failure("reduce_scatter_ordered", detail));
    }
    Ok(())
}

pub(crate) fn check_reduce_scatter(comm: &dyn Comm, id: u64, counts: &[usize]) -> Result<(), CheckFailure> {
    let total = counts.iter().sum();
    let send = make_tensor(id, comm.rank(), total);
    let mut recv = Buf::from_slice(&vec![f32::NAN; counts[comm.rank()]]);
    comm.reduce_scatter(recv.view_mut(), send.view(), counts).map_err(to_named_failure("reduce_scatter"))?;
    let start = compute_offsets(counts)[comm.rank()];
    let expected = (start..start + counts[comm.rank()])
        .map(|i| compute_tree_sum((0..comm.world_size()).map(|r| compute_value(id, r, i))));
    check_equal("reduce_scatter", recv.host_slice(), expected)
}

pub(crate) fn check_all_reduce(comm: &dyn Comm, id: u64, len: usize) -> Result<(), CheckFailure> {
    let mut x = make_tensor(id, comm.rank(), len);
    comm.all_reduce(x.view_mut()).map_err(to_named_failure("all_reduce"))?;
    check_equal(
        "all_reduce",
        x.host_slice(),
        (0..len).map(|i| compute_tree_sum((0..comm.world_size()).map(|r| compute_value(id, r, i)))),
    )
}

pub(crate) fn check_broadcast(comm: &dyn Comm, id: u64, len: usize, root: usize) -> Result<(), CheckFailure> {
    let mut x = make_tensor(id, comm.rank(), len);
    comm.broadcast(x.view_mut(), root).map_err(to_named_failure("broadcast"))?;
    check_equal("broadcast", x.host_slice(), (0..len).map(|i| compute_value(id, root, i)))
}

/// Checks an all-to-all in which rank `from` sends `matrix[from][to]` elements to rank `to`.
pub(crate) fn check_all_to_all(comm: &dyn Comm, id: u64, matrix: &[Vec<usize>]) -> Result<(), CheckFailure> {
    let me = comm.rank();
    let recv_counts: Vec<usize> = matrix.iter().map(|row| row[me]).collect();
    let send = make_tensor(id, me, matrix[me].iter().sum());
    let mut recv = Buf::from_slice(&vec![f32::NAN; recv_counts.iter().sum()]);
    comm.all_to_all(recv.view_mut(), &recv_counts, send.view(), &matrix[me])
        .map_err(to_named_failure("all_to_all"))?;
    let from = |r: usize| {
        let start = compute_offsets(&matrix[r])[me];
        (start..start + matrix[r][me]).map(move |i| compute_value(id, r, i))
    };
    let expected: Vec<f32> = (0..comm.world_size()).flat_map(from).collect();
    check_equal("all_to_all", recv.host_slice(), expected.iter().copied())?;
    let bits = |x: &f32| x.to_bits() as u16;
    let sent_bits: Vec<u16> = send.host_slice().iter().map(bits).collect();
    let (send, mut recv) = (make_half_tensor(&sent_bits), Buf::zeroed_as(Dtype::Bf16, recv.len()));
    let exchanged = comm.all_to_all(recv.view_mut(), &recv_counts, send.view(), &matrix[me]);
    exchanged.map_err(to_named_failure("all_to_all of halves"))?;
    check_equal_halves("all_to_all", &recv, expected.iter().map(bits))?;
    check_all_to_all_of_numbers(comm, id, matrix)
}

/// Computes the i-th number that rank `from` sends to rank `to` in test `id`. Most numbers are not
/// representable as `f32` or `f64`, and some are the bits of a signaling NaN.
fn compute_number(id: u64, from: usize, to: usize, i: usize) -> u64 {
    let number = Rng(id ^ (from as u64) << 40 ^ (to as u64) << 24 ^ i as u64).next_u64();
    if number.is_multiple_of(4) { 0x7ff0_0000_7f80_0001 } else { number }
}

/// Checks all-to-all exchanges of `u64` numbers and of bytes, in which rank `from` sends
/// `matrix[from][to]` elements to rank `to`.
fn check_all_to_all_of_numbers(comm: &dyn Comm, id: u64, matrix: &[Vec<usize>]) -> Result<(), CheckFailure> {
    let me = comm.rank();
    let part = |from: usize, to: usize| (0..matrix[from][to]).map(move |i| compute_number(id, from, to, i));
    let recv_counts: Vec<usize> = matrix.iter().map(|row| row[me]).collect();
    let send: Vec<u64> = (0..comm.world_size()).flat_map(|to| part(me, to)).collect();
    let expected: Vec<u64> = (0..comm.world_size()).flat_map(|from| part(from, me)).collect();
    let numbers =
        comm.all_to_all_u64(&recv_counts, &send, &matrix[me]).map_err(to_named_failure("all_to_all_u64"))?;
    if numbers != expected {
        return Err(make_failure("all_to_all_u64", "wrong numbers"));
    }
    let to_bytes = |numbers: &[u64]| numbers.iter().map(|number| *number as u8).collect::<Vec<u8>>();
    let mut received = vec![0; expected.len()];
    comm.all_to_all_bytes(&mut received, &recv_counts, &to_bytes(&send), &matrix[me])
        .map_err(to_named_failure("all_to_all_bytes"))?;
    if received != to_bytes(&expected) {
        return Err(make_failure("all_to_all_bytes", "wrong bytes"));
    }
    Ok(())
}

pub(crate) fn check_all_gather_bytes(comm: &dyn Comm, id: u64, lens: &[usize]) -> Result<(), CheckFailure> {
    let bytes = |r: usize| (0..lens[r]).map(|i| compute_value(id, r, i).to_bits() as u8).collect::<Vec<u8>>();
    let actual = comm.all_gather_bytes(&bytes(comm.rank())).map_err(to_named_failure("all_gather_bytes"))?;
    let expected: Vec<Vec<u8>> = (0..comm.world_size()).map(bytes).collect();
    if actual != expected {
        return Err(make_failure("all_gather_bytes", "wrong bytes"));
    }
    let numbers = |r: usize| (0..lens[r] / 8).map(|i| compute_number(id, r, r, i)).collect::<Vec<u64>>();
    let actual = comm.all_gather_u64(&numbers(comm.rank())).map_err(to_named_failure("all_gather_u64"))?;
    if actual != (0..comm.world_size()).map(numbers).collect::<Vec<_>>() {
        return Err(make_failure("all_gather_u64", "wrong numbers"));
    }
    Ok(())
}

/// Checks that every rank reads from a shared window the values that each rank wrote, also after
/// pages were released and the values were replaced.
pub(crate) fn check_shared_window(comm: &dyn Comm, id: u64, counts: &[usize]) -> Result<(), CheckFailure> {
    let Some(mut window) =
        comm.shared_window(Dtype::F32, counts).map_err(to_named_failure("shared_window"))?
    else {
        return Ok(());
    };
    let total: usize = counts.iter().sum();
    // SAFETY: no rank writes before the next barrier.
    let before = unsafe { window.view.view() };
    check_equal("shared_window before writing", before.host_slice(), vec![0.0; total].into_iter())?;
    for id in [id, id.wrapping_add(1)] {
        comm.barrier().map_err(to_named_failure("barrier"))?;
        let mine = make_tensor(id, comm.rank(), counts[comm.rank()]);
        window.owned.host_slice_mut().copy_from_slice(mine.host_slice());
        comm.barrier().map_err(to_named_failure("barrier"))?;
        let expected: Vec<f32> = counts
            .iter()
            .enumerate()
            .flat_map(|(r, &n)| (0..n).map(move |i| compute_value(id, r, i)))
            .collect();
        for _ in 0..2 {
            // SAFETY: every rank has written, and no rank writes before the next barrier.
            let view = unsafe { window.view.view() };
            check_equal("shared_window", view.host_slice(), expected.iter().copied())?;
            window.view.release_peer_pages();
        }
    }
    Ok(())
}
