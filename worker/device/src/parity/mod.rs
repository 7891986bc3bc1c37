//! A card's results beside the CPU's: every op on odd, tiny and large shapes, in every element type, on memory that begins
//! anywhere, with outputs that were poisoned. Tests run it on an emulated card, `launch gpu-check` on a real one.
mod cases;
mod fp8;

use crate::{
    Buf, Cpu, Cuda, Dtype, Ops, View, ViewMut,
    ops::{AttentionDropout, AttentionShape},
    storage::{Storage, panic_message},
};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// How far results of one family of ops lie apart.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    pub what: &'static str,
    /// Shapes that were tried.
    pub shapes: usize,
    pub worst: Worst,
    /// Why the family failed.
    pub failed: Option<String>,
}

/// Largest differences relative to the largest expected value.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Worst {
    pub f32: f64,
    pub bf16: f64,
    pub f16: f64,
}

impl std::ops::AddAssign for Worst {
    fn add_assign(&mut self, o: Worst) {
        self.f32 = self.f32.max(o.f32);
        self.bf16 = self.bf16.max(o.bf16);
        self.f16 = self.f16.max(o.f16);
    }
}

type Outcome = Result<Worst, String>;

/// Differences that are the number of bits' fault: operands are rounded once before, results once after, and what is kept
/// between a forward and its backward, too.
const TOLERANCES: [(Dtype, usize, f64); 5] = [
    (Dtype::Bf16, 0, 2e-2),
    (Dtype::F32, 0, 1e-5),
    (Dtype::F32, 3, 1e-5),
    (Dtype::Bf16, 1, 2e-2),
    (Dtype::F16, 0, 3e-3),
];

/// `rounds` random shapes of every family of ops, and shapes at which kernels do something else.
pub fn run(cuda: &Cuda, seed: u64, rounds: usize) -> Vec<Row> {
    let pair = Pair { cpu: Cpu::new(1), cuda, types: &TOLERANCES };
    type Case<'a> = Box<dyn Fn(&mut Random) -> Outcome + 'a>;
    let p = &pair;
    let random: [(&str, Case); 9] = [
        (
            "matrix products",
            Box::new(|r| cases::products(p, r.next(), r.from(1, 40), r.from(1, 40), r.from(1, 40))),
        ),
        ("norms, bias", Box::new(|r| cases::norms(p, r.next(), r.from(1, 150), r.from(1, 90)))),
        (
            "norms of heads, rope",
            Box::new(|r| cases::heads(p, r.next(), r.from(1, 40), r.from(1, 5), r.from(1, 40), r.from(1, 3))),
        ),
        ("activations", Box::new(|r| cases::activations(p, r.next(), r.from(1, 20), r.from(1, 300)))),
        ("attention", Box::new(|r| attention(p, r))),
        (
            "classifier",
            Box::new(|r| {
                let cap = (r.below(2) == 0).then_some(3.0);
                cases::classifier(p, r.next(), r.from(1, 40), r.from(1, 40), r.from(1, 200), cap)
            }),
        ),
        ("experts", Box::new(|r| experts(p, r))),
        (
            "embedding",
            Box::new(|r| cases::embedding(p, r.next(), r.from(1, 120), r.from(1, 70), r.from(1, 50))),
        ),
        ("sums, norms, optimizers", Box::new(|r| cases::flat(p, r.next(), r.from(1, 9000)))),
    ];
    let mut rows: Vec<Row> = random
        .iter()
        .enumerate()
        .map(|(i, (what, case))| {
            let mut r = Random::new(seed ^ ((i as u64 + 1) << 32));
            row(what, (0..rounds).map(|_| case(&mut r)))
        })
        .collect();
    rows.push(row(
        "shapes at the edges",
        edges(p).into_iter().chain(tiles(p)).chain(eights(p)).map(|case| case()),
    ));
    if cuda.properties().has_fp8() {
        let mut r = Random::new(seed ^ (99 << 32));
        let products = (0..rounds)
            .map(|_| fp8::products(p, r.next(), r.from(1, 70), 16 * r.from(1, 4), r.from(1, 50)))
            .collect::<Vec<_>>();
        rows.push(row("products in fp8", products.into_iter().chain([fp8::codes(p)])));
    }
    rows
}

/// Attention on a card that cuDNN alone computes it for ([`Cuda::choose_attention`]): `rounds` random shapes, those of models, windows.
pub fn by_cudnn(cuda: &Cuda, seed: u64, rounds: usize) -> Row {
    let types = [TOLERANCES[0], (Dtype::Bf16, 8, TOLERANCES[0].2)];
    let pair = Pair { cpu: Cpu::new(1), cuda, types: &types };
    let mut r = Random::new(seed ^ (77 << 32));
    let mut shapes: Vec<(usize, AttentionShape)> = (0..rounds)
        .map(|_| {
            let (kv_heads, t) = (r.from(1, 4), r.from(2, 200));
            let shape =
                AttentionShape::new(r.from(1, 4), t, kv_heads * r.from(1, 4), kv_heads, 8 * r.from(1, 17));
            (if r.below(2) == 0 { usize::MAX } else { r.from(1, t) }, shape)
        })
        .collect();
    let shape = AttentionShape::new;
    shapes.extend([
        (usize::MAX, shape(2, 256, 4, 4, 64)),
        (usize::MAX, shape(1, 300, 7, 1, 64)),
        (usize::MAX, shape(1, 130, 4, 1, 128)),
        (100, AttentionShape { scale: 0.3, ..shape(1, 260, 2, 1, 128) }),
    ]);
    let cases = shapes.into_iter().enumerate();
    row(
        "attention by cuDNN",
        cases.map(|(i, (window, shape))| cases::windowed_attention(&pair, i as u64, window, shape)),
    )
}

fn attention(p: &Pair, r: &mut Random) -> Outcome {
    let kv_heads = r.from(1, 3);
    let shape =
        AttentionShape::new(r.from(1, 3), r.from(1, 80), kv_heads * r.from(1, 3), kv_heads, r.from(1, 40));
    let softcap = shape.t.is_multiple_of(2).then_some(2.0);
    let dropout = if shape.t.is_multiple_of(3) { dropped(r.next()) } else { None };
    cases::attention(p, r.next(), AttentionShape { softcap, dropout, ..shape })
}

/// Of sequences with high numbers.
fn dropped(first: u64) -> Option<AttentionDropout> {
    Some(AttentionDropout { key: [first as u32, 5], share: 0.3, first: first >> 22 })
}

fn experts(p: &Pair, r: &mut Random) -> Outcome {
    let count = r.from(1, 70);
    let mut worst =
        cases::experts(p, r.next(), r.from(1, 30), count, r.from(1, 5).min(count), r.from(1, 50))?;
    let sizes: Vec<usize> = (0..r.from(1, 5)).map(|_| r.below(9)).collect();
    worst += cases::grouped(p, r.next(), &sizes, r.from(1, 30), r.from(1, 30))?;
    Ok(worst)
}

/// Rows longer than a block, heads as wide as they may be, documents across tiles, more blocks than one launch has.
fn edges<'a>(p: &'a Pair) -> Vec<Box<dyn Fn() -> Outcome + 'a>> {
    // The backward's tiles lie in shared memory: 137 KiB of it for 256 elements. Cards other than a data centre's have 99.
    let widest = if p.cuda.properties().shared_memory_per_block < 144 << 10 { 176 } else { 256 };
    vec![
        Box::new(move || cases::norms(p, 1, 2, 1000)),
        Box::new(move || cases::norms(p, 2, 129, 33)),
        Box::new(move || cases::attention(p, 3, AttentionShape::new(1, 33, 2, 1, widest))),
        Box::new(|| {
            cases::attention(p, 4, AttentionShape { scale: 0.7, ..AttentionShape::new(2, 100, 2, 2, 8) })
        }),
        Box::new(move || cases::attention(p, 12, AttentionShape::new(1, 70, 2, 1, 128))),
        Box::new(move || cases::attention(p, 13, AttentionShape::new(1, 130, 2, 2, 96))),
        Box::new(move || {
            let dropout = dropped(u64::MAX);
            cases::attention(p, 15, AttentionShape { dropout, ..AttentionShape::new(2, 130, 4, 2, 40) })
        }),
        Box::new(move || {
            let dropout = dropped(1 << 60);
            cases::attention(p, 16, AttentionShape { dropout, ..AttentionShape::new(1, 100, 2, 1, widest) })
        }),
        Box::new(move || cases::attention(p, 14, AttentionShape::new(1, 40, 2, 1, 64))),
        Box::new(move || cases::classifier(p, 5, 130, 3, 700, None)),
        Box::new(move || cases::experts(p, 6, 3, 1024, 9, 4)),
        Box::new(move || cases::grouped(p, 7, &[3, 0, 17, 1], 9, 14)),
        Box::new(move || cases::grouped(p, 8, &[0, 0], 4, 4)),
        Box::new(move || cases::embedding(p, 9, 300, 3, 2)),
        Box::new(move || cases::flat(p, 10, 40_000)),
        Box::new(move || cases::activations(p, 11, 1, 700)),
    ]
}

/// Rows of whole eights: one for a warp, one for each thread of a block, several, and more than are kept in registers; the same of
/// heads, and of sums over more rows than a block has.
fn eights<'a>(p: &'a Pair) -> Vec<Box<dyn Fn() -> Outcome + 'a>> {
    vec![
        Box::new(move || cases::norms(p, 40, 3, 8)),
        Box::new(move || cases::norms(p, 41, 131, 64)),
        Box::new(move || cases::norms(p, 42, 5, 1016)),
        Box::new(move || cases::norms(p, 43, 2, 2056)),
        Box::new(move || cases::norms(p, 44, 2, 8192)),
        Box::new(move || cases::norms(p, 45, 1, 8200)),
        Box::new(move || cases::heads(p, 46, 21, 3, 64, 2)),
        Box::new(move || cases::heads(p, 47, 3, 40, 8, 1)),
        Box::new(move || cases::heads(p, 48, 2, 1, 264, 3)),
        Box::new(move || cases::activations(p, 49, 3, 2056)),
        Box::new(move || cases::activations(p, 50, 17, 8)),
        Box::new(move || cases::classifier(p, 51, 5, 8, 2088, None)),
        Box::new(move || cases::classifier(p, 52, 3, 8, 2051, Some(2.0))),
    ]
}

/// Attention over several tiles: tiles that are seen whole, in part and not at all, heads of every size that kernels are made
/// for and between them, groups of 1 to 8 heads, caps and dropout. Windows of 95 and 79 begin one position behind the first of a
/// chunk: the least that a mask must hide.
fn tiles<'a>(p: &'a Pair) -> Vec<Box<dyn Fn() -> Outcome + 'a>> {
    let all = usize::MAX;
    let shape = AttentionShape::new;
    let (softcap, dropout) = (Some(3.0), dropped(1 << 30));
    vec![
        Box::new(move || cases::windowed_attention(p, 20, all, shape(1, 256, 2, 1, 64))),
        Box::new(move || cases::windowed_attention(p, 21, all, shape(1, 290, 1, 1, 128))),
        Box::new(move || cases::windowed_attention(p, 22, 95, shape(1, 300, 3, 1, 40))),
        Box::new(move || cases::windowed_attention(p, 23, 79, shape(2, 210, 2, 1, 72))),
        Box::new(move || cases::windowed_attention(p, 24, 1, shape(1, 150, 8, 1, 16))),
        Box::new(move || cases::attention(p, 25, shape(1, 257, 4, 2, 96))),
        Box::new(move || cases::attention(p, 26, shape(2, 129, 8, 1, 64))),
        Box::new(move || cases::ragged_attention(p, 27, shape(1, 270, 2, 2, 63))),
        Box::new(move || cases::ragged_attention(p, 28, shape(1, 200, 2, 1, 127))),
        Box::new(move || {
            cases::windowed_attention(p, 29, all, AttentionShape { softcap, ..shape(1, 260, 1, 1, 128) })
        }),
        Box::new(move || {
            cases::windowed_attention(
                p,
                30,
                150,
                AttentionShape { softcap, dropout, ..shape(1, 260, 2, 1, 64) },
            )
        }),
        Box::new(move || {
            cases::ragged_attention(p, 31, AttentionShape { softcap, dropout, ..shape(1, 230, 2, 1, 120) })
        }),
    ]
}

/// Runs cases until one fails. What stops the worker in training stops a family here.
fn row(what: &'static str, cases: impl Iterator<Item = Outcome>) -> Row {
    let mut row = Row { what, shapes: 0, worst: Worst::default(), failed: None };
    let mut cases = cases;
    loop {
        match catch_unwind(AssertUnwindSafe(|| cases.next())) {
            Ok(None) => return row,
            Ok(Some(Ok(worst))) => row.worst += worst,
            Ok(Some(Err(why))) => row.failed = Some(why),
            Err(panic) => row.failed = Some(panic_message(panic.as_ref())),
        }
        row.shapes += 1;
        if row.failed.is_some() {
            return row;
        }
    }
}

/// A buffer of a case: its values, and whether it may be 16 bits.
struct Given {
    values: Vec<f32>,
    any_type: bool,
}

/// Activations and weights.
fn any(values: Vec<f32>) -> Given {
    Given { values, any_type: true }
}

/// Statistics, gradients of weights, states.
fn wide(values: Vec<f32>) -> Given {
    Given { values, any_type: false }
}

/// An output that must be written whole.
fn poison(len: usize) -> Vec<f32> {
    vec![f32::NAN; len]
}

/// A buffer that begins some elements after its memory.
struct Part {
    buf: Buf,
    shift: usize,
}

impl Part {
    fn view(&self) -> View<'_> {
        self.buf.view().slice(self.shift..self.buf.len())
    }
    fn view_mut(&mut self) -> ViewMut<'_> {
        let len = self.buf.len();
        self.buf.view_mut().slice(self.shift..len)
    }
}

/// The two that are compared.
struct Pair<'a> {
    cpu: Cpu,
    cuda: &'a Cuda,
    /// Element types, how far from their memory buffers begin, and how far apart results may be.
    types: &'a [(Dtype, usize, f64)],
}

impl Pair<'_> {
    /// What an op leaves in its buffers on the card beside what it leaves on the CPU, which gets the rounded values as f32.
    fn compare(&self, what: &str, given: &[Given], run: impl Fn(&dyn Ops, &mut [Part])) -> Outcome {
        self.compare_within(0.0, what, given, run)
    }

    /// As [`Pair::compare`], with this tolerance at least in every type.
    fn compare_within(
        &self,
        least: f64,
        what: &str,
        given: &[Given],
        run: impl Fn(&dyn Ops, &mut [Part]),
    ) -> Outcome {
        let mut worst = Worst::default();
        for (dtype, shift, tolerance) in self.types.iter().map(|(d, s, t)| (*d, *s, t.max(least))) {
            let rounded: Vec<Vec<f32>> = given
                .iter()
                .map(|g| if g.any_type { self.through(dtype, &g.values) } else { g.values.clone() })
                .collect();
            let mut host: Vec<Part> =
                rounded.iter().map(|v| Part { buf: Buf::from_slice(v), shift: 0 }).collect();
            run(&self.cpu, &mut host);
            let mut there: Vec<Part> = rounded
                .iter()
                .zip(given)
                .map(|(v, g)| self.on_card(if g.any_type { dtype } else { Dtype::F32 }, v, shift))
                .collect();
            run(self.cuda, &mut there);
            for (i, (want, got)) in host.iter().zip(&there).enumerate() {
                let apart = apart(&self.to_host(got.view()), want.view().host());
                if apart > tolerance || apart.is_nan() {
                    return Err(format!("{what}, {dtype:?}, shift {shift}, buffer {i}: {apart:e} apart"));
                }
                match dtype {
                    Dtype::F32 => worst.f32 = worst.f32.max(apart),
                    Dtype::Bf16 => worst.bf16 = worst.bf16.max(apart),
                    Dtype::F16 => worst.f16 = worst.f16.max(apart),
                }
            }
        }
        Ok(worst)
    }

    fn on_card(&self, dtype: Dtype, values: &[f32], shift: usize) -> Part {
        let padded: Vec<f32> = std::iter::repeat_n(7.0, shift).chain(values.iter().copied()).collect();
        let from = self.cuda.device_copy((&padded[..]).into());
        let mut buf = self.cuda.zeroed(dtype, padded.len());
        self.cuda.cast(buf.view_mut(), from.view());
        Part { buf, shift }
    }

    fn to_host(&self, from: View) -> Vec<f32> {
        let mut wide = self.cuda.zeroed(Dtype::F32, from.len());
        self.cuda.cast(wide.view_mut(), from);
        self.cuda.host_copy(wide.view()).host().to_vec()
    }

    /// The values as this type keeps them.
    fn through(&self, dtype: Dtype, values: &[f32]) -> Vec<f32> {
        self.to_host(self.on_card(dtype, values, 0).view())
    }
}

/// The largest difference relative to the largest expected value (or 1e-3, if that is larger); what is no number on one side
/// only is infinitely far.
fn apart(got: &[f32], want: &[f32]) -> f64 {
    let size = want.iter().fold(1e-3f64, |m, w| m.max(f64::from(w.abs())));
    let pairs = got.iter().zip(want);
    let each = pairs.map(|(g, w)| match (g.is_nan(), w.is_nan()) {
        (true, true) => 0.0,
        (false, false) => (f64::from(*g) - f64::from(*w)).abs() / size,
        _ => f64::INFINITY,
    });
    if got.len() == want.len() { each.fold(0.0, f64::max) } else { f64::INFINITY }
}

/// A small generator of reproducible numbers.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16
    }

    /// In 0..n.
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// In first..end.
    fn from(&mut self, first: usize, end: usize) -> usize {
        first + self.below(end - first)
    }

    /// Uniform in (−1, 1).
    fn vec(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| (self.next() % (1 << 24)) as f32 / (1 << 23) as f32 - 1.0).collect()
    }

    /// Starts of documents of random lengths, in each of `b` sequences of `t` tokens.
    fn starts(&mut self, b: usize, t: usize, mean: usize) -> Vec<u32> {
        let mut starts = Vec::new();
        for _ in 0..b {
            let mut start = 0;
            for q in 0..t {
                if q > 0 && self.below(mean) == 0 {
                    start = q;
                }
                starts.push(start as u32);
            }
        }
        starts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_apart_is_seen() {
        assert_eq!(apart(&[1.0, f32::NAN], &[1.0, f32::NAN]), 0.0);
        assert!((apart(&[1.0, 2.5], &[1.0, 2.0]) - 0.25).abs() < 1e-9);
        for wrong in [&[f32::NAN, 1.0][..], &[1.0], &[1.0, f32::INFINITY]] {
            assert_eq!(apart(wrong, &[1.0, 1.0]), f64::INFINITY, "{wrong:?}");
        }
        assert_eq!(apart(&[1.0, 1.0], &[f32::NAN, 1.0]), f64::INFINITY);
    }

    #[test]
    fn a_family_ends_with_its_first_failure() {
        let cases =
            [Ok(Worst { f32: 1e-6, ..Worst::default() }), Err("a bug".to_owned()), Ok(Worst::default())];
        let told = row("ops", cases.into_iter());
        assert_eq!((told.shapes, told.worst.f32, told.failed.as_deref()), (2, 1e-6, Some("a bug")));
        let told = row(
            "ops",
            [1].into_iter().map(|n| if n == 1 { panic!("card {n} fell off") } else { Ok(Worst::default()) }),
        );
        assert_eq!(told.failed.as_deref(), Some("card 1 fell off"));
    }
}
