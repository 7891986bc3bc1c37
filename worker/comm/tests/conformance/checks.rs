//! Checks that any group must pass: every collective against a brute-force twin that knows all ranks' values.
use comm::Comm;
use device::{Buf, Dtype};

/// A small generator (splitmix64): the ranks of a group draw the same plan from the same seed.
#[derive(Clone)]
pub(crate) struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// A length: often 0 or tiny, at most `max`.
    fn len(&mut self, max: usize) -> usize {
        match self.below(5) {
            0 => 0,
            1 => self.below(4).min(max),
            2 => max - self.below(3).min(max),
            _ => self.below(max + 1),
        }
    }

    fn counts(&mut self, world: usize, max: usize) -> Vec<usize> {
        match self.below(4) {
            0 => vec![self.len(max); world],
            _ => (0..world).map(|_| self.len(max)).collect(),
        }
    }
}

/// The i-th value of tensor `id` on `rank`: of very different sizes, so that another order of a sum has other bits.
fn value(id: u64, rank: usize, i: usize) -> f32 {
    let h = Rng(id ^ (rank as u64) << 40 ^ (i as u64) << 8).next();
    let scale = [1.0, 1e-5, 1e5, -1e5][(h & 3) as usize];
    (1.0 + (h >> 40) as f32 / (1u64 << 24) as f32) * scale
}

fn tensor(id: u64, rank: usize, len: usize) -> Buf {
    Buf::from_slice(&(0..len).map(|i| value(id, rank, i)).collect::<Vec<_>>())
}

/// The documented tree over ranks, as a binary counter.
fn tree(values: impl Iterator<Item = f32>) -> f32 {
    let mut stack: Vec<(usize, f32)> = Vec::new();
    for v in values {
        let mut top = (1, v);
        while stack.last().is_some_and(|s| s.0 == top.0) {
            let left = stack.pop().expect("just seen");
            top = (2 * top.0, left.1 + top.1);
        }
        stack.push(top);
    }
    stack.into_iter().rev().map(|s| s.1).reduce(|right, left| left + right).expect("at least one rank")
}

fn same(what: &str, got: &[f32], want: impl ExactSizeIterator<Item = f32>) -> Result<(), String> {
    if got.len() != want.len() {
        return Err(format!("{what}: {} elements, not {}", got.len(), want.len()));
    }
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        if g.to_bits() != w.to_bits() {
            return Err(format!("{what}: element {i} of {} is {g}, not {w}", got.len()));
        }
    }
    Ok(())
}

fn failed(what: &str) -> impl Fn(comm::CommError) -> String {
    move |e| format!("{what}: {e}")
}

fn starts(counts: &[usize]) -> Vec<usize> {
    (0..counts.len()).map(|r| counts[..r].iter().sum()).collect()
}

/// `steps` collectives in a row, drawn from `seed`, parts of at most `max` elements.
pub(crate) fn run(comm: &dyn Comm, seed: u64, steps: usize, max: usize) -> Result<(), String> {
    let mut rng = Rng(seed);
    for step in 0..steps {
        let id = rng.next();
        let kind = if step < 9 { step } else { rng.below(9) };
        one(comm, kind, id, &mut rng, max)
            .map_err(|e| format!("rank {} of {}, step {step}: {e}", comm.rank(), comm.world()))?;
    }
    Ok(())
}

fn one(comm: &dyn Comm, kind: usize, id: u64, rng: &mut Rng, max: usize) -> Result<(), String> {
    match kind {
        0 => all_gather(comm, id, &rng.counts(comm.world(), max)),
        1 => {
            let counts = rng.counts(comm.world(), max);
            let partials: Vec<usize> = (0..comm.world()).map(|_| rng.below(4)).collect();
            reduce_scatter_fold(comm, id, &counts, &partials)
        }
        2 => reduce_scatter(comm, id, &rng.counts(comm.world(), max)),
        3 => all_reduce(comm, id, rng.len(max * 2)),
        4 => broadcast(comm, id, rng.len(max * 2), rng.below(comm.world())),
        5 => {
            let world = comm.world();
            let matrix: Vec<Vec<usize>> = (0..world).map(|_| rng.counts(world, max)).collect();
            all_to_all(comm, id, &matrix)
        }
        6 => all_gather_bytes(comm, id, &rng.counts(comm.world(), max * 4)),
        7 => common(comm, id, &rng.counts(comm.world(), max)),
        _ => comm.barrier().map_err(failed("barrier")),
    }
}

pub(crate) fn all_gather(comm: &dyn Comm, id: u64, counts: &[usize]) -> Result<(), String> {
    let total: usize = counts.iter().sum();
    let mut recv = Buf::from_slice(&vec![f32::NAN; total]);
    let send = tensor(id, comm.rank(), counts[comm.rank()]);
    comm.all_gather(recv.view_mut(), send.view(), counts).map_err(failed("all_gather"))?;
    let want: Vec<f32> =
        counts.iter().enumerate().flat_map(|(r, &n)| (0..n).map(move |i| value(id, r, i))).collect();
    same("all_gather", recv.host(), want.into_iter())?;
    all_gather_halves(comm, id, counts)
}

/// The same with elements of two bytes.
fn all_gather_halves(comm: &dyn Comm, id: u64, counts: &[usize]) -> Result<(), String> {
    let bits = |r: usize| (0..counts[r]).map(move |i| value(id, r, i).to_bits() as u16);
    let send = halves(&bits(comm.rank()).collect::<Vec<_>>());
    let mut recv = Buf::zeroed_as(Dtype::Bf16, counts.iter().sum());
    comm.all_gather(recv.view_mut(), send.view(), counts).map_err(failed("all_gather of halves"))?;
    same_halves("all_gather", &recv, (0..comm.world()).flat_map(bits))
}

fn halves(bits: &[u16]) -> Buf {
    let mut buf = Buf::zeroed_as(Dtype::Bf16, bits.len());
    buf.view_mut().halves().copy_from_slice(bits);
    buf
}

fn same_halves(what: &str, got: &Buf, want: impl Iterator<Item = u16>) -> Result<(), String> {
    let same = got.view().halves().iter().copied().eq(want);
    if same { Ok(()) } else { Err(format!("{what} of halves: other bits")) }
}

pub(crate) fn reduce_scatter_fold(
    comm: &dyn Comm,
    id: u64,
    counts: &[usize],
    partials: &[usize],
) -> Result<(), String> {
    let total = counts.iter().sum();
    let me = comm.rank();
    let partial_id = |i: usize| id.wrapping_add(i as u64);
    let mine: Vec<Buf> = (0..partials[me]).map(|i| tensor(partial_id(i), me, total)).collect();
    let views: Vec<_> = mine.iter().map(Buf::view).collect();
    let mut seen = Vec::new();
    let start = starts(counts)[me];
    let mut wrong = Ok(());
    comm.reduce_scatter_fold(&views, counts, &mut |rank, i, piece| {
        seen.push((rank, i));
        if wrong.is_ok() {
            let want: Vec<f32> = (start..start + counts[me]).map(|k| value(partial_id(i), rank, k)).collect();
            wrong = same(&format!("piece ({rank}, {i})"), piece.host(), want.into_iter());
        }
    })
    .map_err(failed("reduce_scatter_fold"))?;
    wrong?;
    let order: Vec<_> = partials.iter().enumerate().flat_map(|(r, &n)| (0..n).map(move |i| (r, i))).collect();
    if seen != order {
        return Err(format!("pieces came as {seen:?}, not as {order:?}"));
    }
    Ok(())
}

pub(crate) fn reduce_scatter(comm: &dyn Comm, id: u64, counts: &[usize]) -> Result<(), String> {
    let total = counts.iter().sum();
    let send = tensor(id, comm.rank(), total);
    let mut recv = Buf::from_slice(&vec![f32::NAN; counts[comm.rank()]]);
    comm.reduce_scatter(recv.view_mut(), send.view(), counts).map_err(failed("reduce_scatter"))?;
    let start = starts(counts)[comm.rank()];
    let want = (start..start + counts[comm.rank()]).map(|i| tree((0..comm.world()).map(|r| value(id, r, i))));
    same("reduce_scatter", recv.host(), want)
}

pub(crate) fn all_reduce(comm: &dyn Comm, id: u64, len: usize) -> Result<(), String> {
    let mut x = tensor(id, comm.rank(), len);
    comm.all_reduce(x.view_mut()).map_err(failed("all_reduce"))?;
    same("all_reduce", x.host(), (0..len).map(|i| tree((0..comm.world()).map(|r| value(id, r, i)))))
}

pub(crate) fn broadcast(comm: &dyn Comm, id: u64, len: usize, root: usize) -> Result<(), String> {
    let mut x = tensor(id, comm.rank(), len);
    comm.broadcast(x.view_mut(), root).map_err(failed("broadcast"))?;
    same("broadcast", x.host(), (0..len).map(|i| value(id, root, i)))
}

/// `matrix[from][to]` elements.
pub(crate) fn all_to_all(comm: &dyn Comm, id: u64, matrix: &[Vec<usize>]) -> Result<(), String> {
    let me = comm.rank();
    let recv_counts: Vec<usize> = matrix.iter().map(|row| row[me]).collect();
    let send = tensor(id, me, matrix[me].iter().sum());
    let mut recv = Buf::from_slice(&vec![f32::NAN; recv_counts.iter().sum()]);
    comm.all_to_all(recv.view_mut(), &recv_counts, send.view(), &matrix[me]).map_err(failed("all_to_all"))?;
    let from = |r: usize| {
        let start = starts(&matrix[r])[me];
        (start..start + matrix[r][me]).map(move |i| value(id, r, i))
    };
    let want: Vec<f32> = (0..comm.world()).flat_map(from).collect();
    same("all_to_all", recv.host(), want.iter().copied())?;
    let bits = |x: &f32| x.to_bits() as u16;
    let given: Vec<u16> = send.host().iter().map(bits).collect();
    let (send, mut recv) = (halves(&given), Buf::zeroed_as(Dtype::Bf16, recv.len()));
    let traded = comm.all_to_all(recv.view_mut(), &recv_counts, send.view(), &matrix[me]);
    traded.map_err(failed("all_to_all of halves"))?;
    same_halves("all_to_all", &recv, want.iter().map(bits))
}

pub(crate) fn all_gather_bytes(comm: &dyn Comm, id: u64, lens: &[usize]) -> Result<(), String> {
    let bytes = |r: usize| (0..lens[r]).map(|i| value(id, r, i).to_bits() as u8).collect::<Vec<u8>>();
    let got = comm.all_gather_bytes(&bytes(comm.rank())).map_err(failed("all_gather_bytes"))?;
    let want: Vec<Vec<u8>> = (0..comm.world()).map(bytes).collect();
    if got != want {
        return Err("all_gather_bytes: wrong bytes".into());
    }
    Ok(())
}

/// Memory in common: what each rank writes the others read, also after it was let go and after it was written again.
pub(crate) fn common(comm: &dyn Comm, id: u64, counts: &[usize]) -> Result<(), String> {
    let Some(mut memory) = comm.shared_window(Dtype::F32, counts).map_err(failed("common"))? else {
        return Ok(());
    };
    let total: usize = counts.iter().sum();
    same("common at first", memory.view.view().host(), vec![0.0; total].into_iter())?;
    for id in [id, id.wrapping_add(1)] {
        comm.barrier().map_err(failed("barrier"))?;
        let mine = tensor(id, comm.rank(), counts[comm.rank()]);
        memory.owned.host_mut().copy_from_slice(mine.host());
        comm.barrier().map_err(failed("barrier"))?;
        let want: Vec<f32> =
            counts.iter().enumerate().flat_map(|(r, &n)| (0..n).map(move |i| value(id, r, i))).collect();
        for _ in 0..2 {
            same("common", memory.view.view().host(), want.iter().copied())?;
            memory.view.let_go();
        }
    }
    Ok(())
}
