//! Products in fp8 beside the CPU's, and the numbers that operands become, bit by bit.
use super::{Given, Outcome, Pair, Random, Worst, any, poison, wide};
use crate::Buf;
use crate::fp8::Fp8;
use crate::ops::{FP8_COLUMNS, Fp8Matrix, Ops, Write};

/// Sums in f32 may differ by this: tensor cores are said to keep fewer bits of sums of fp8 than f32 has. Operands that were rounded
/// otherwise differ by more.
const SUMS: f64 = 2e-3;

/// Kinds of the operands as a forward, a backward and GPT-2's backward of a weight have them.
const KINDS: [[Fp8; 2]; 3] = [[Fp8::E4M3, Fp8::E4M3], [Fp8::E5M2, Fp8::E4M3], [Fp8::E4M3, Fp8::E5M2]];

/// However operands lie, with results of any type.
pub(super) fn products(p: &Pair, seed: u64, m: usize, n: usize, k: usize) -> Outcome {
    let mut worst = Worst::default();
    let mut r = Random::new(seed);
    for write in [Write::Set, Write::Add] {
        for (i, [left, right]) in KINDS.into_iter().enumerate() {
            let mut output = |len| if write == Write::Add { r.vec(len) } else { poison(len) };
            let outputs = [any(output(m * n)), wide(output(m * n))];
            let operands = [any(r.vec(m * k)), any(r.vec(k * n))];
            let given: Vec<Given> = outputs.into_iter().chain(operands).collect();
            let what = format!("fp8 {left:?} {right:?} {m} {n} {k} {write:?}");
            worst += p.compare_within(SUMS, &what, &given, |ops, b| {
                let [c, c32, a, b] = b else { unreachable!("four buffers") };
                let a = Fp8Matrix { x: a.view(), kind: left, transposed: i == 1 };
                let b = Fp8Matrix { x: b.view(), kind: right, transposed: i == 0 };
                ops.fp8_product(c.view_mut(), a, b, m, n, k, write);
                ops.fp8_product(c32.view_mut(), a, b, m, n, k, write);
            })?;
        }
    }
    Ok(worst)
}

/// Every bfloat16 up to some magnitude, multiplied with the identity: what it became comes out as it is.
pub(super) fn codes(p: &Pair) -> Outcome {
    let n = FP8_COLUMNS;
    let identity: Vec<f32> = (0..n * n).map(|i| f32::from(u8::from(i % (n + 1) == 0))).collect();
    let finite = |most: f32| {
        let all = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16));
        all.filter(|x| x.abs() <= most).collect::<Vec<f32>>()
    };
    // At the scale 1; below the smallest scale; where the least of them are no normal numbers.
    let mut all: Vec<Vec<f32>> = [448.0, 57344.0, 1e-18, 1e-37].map(finite).to_vec();
    all.push(vec![f32::NAN, 1.0, f32::INFINITY, 2.0, -f32::INFINITY]);
    for (kind, values) in [Fp8::E4M3, Fp8::E5M2].into_iter().flat_map(|k| all.iter().map(move |v| (k, v))) {
        // A row of its own for each value that isn't finite: it makes NaN of all that it is added to.
        let width = if values.iter().all(|x| x.is_finite()) { n } else { 1 };
        let m = values.len().div_ceil(width);
        let mut x = vec![0.0; m * n];
        for (row, some) in x.chunks_mut(n).zip(values.chunks(width)) {
            row[..some.len()].copy_from_slice(some);
        }
        let run = |ops: &dyn Ops| {
            let [x, identity] = [&x, &identity].map(|v| ops.device_copy(v[..].into()));
            let mut c = ops.device_copy(Buf::from_slice(&poison(m * n)).view());
            let x = Fp8Matrix { x: x.view(), kind, transposed: false };
            let identity = Fp8Matrix { x: identity.view(), kind: Fp8::E4M3, transposed: false };
            ops.fp8_product(c.view_mut(), x, identity, m, n, n, Write::Set);
            ops.host_copy(c.view()).host().to_vec()
        };
        let (want, got) = (run(&p.cpu), run(p.cuda));
        let same = |(w, g): (&f32, &f32)| w == g || (w.is_nan() && g.is_nan());
        if let Some(at) = want.iter().zip(&got).position(|pair| !same(pair)) {
            let (x, want, got) = (x[at], want[at], got[at]);
            return Err(format!("{x:e} in {kind:?} is {got:e} on the card, {want:e} on the CPU"));
        }
    }
    Ok(Worst::default())
}
