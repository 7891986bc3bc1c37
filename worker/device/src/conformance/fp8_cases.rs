//! Compares fp8 matmuls on the GPU with the CPU, and the rounding of their operands bit by bit.
use super::comparison::{
    Backends, CaseResult, CaseRng, MaxErrors, make_buffer_of_tested_type, make_f32_buffer, make_nan_values,
};
use super::error::ConformanceError;
use crate::Buf;
use crate::fp8::Fp8Format;
use crate::ops::{FP8_COLUMN_MULTIPLE, Fp8Operand, Ops, WriteMode};

/// The largest tolerated relative difference between an fp8 matmul on the GPU and the `f32` sums of
/// the CPU. Tensor cores keep fewer bits of fp8 sums than `f32` has. Wrong rounding of an operand
/// causes larger errors.
const SUM_TOLERANCE: f64 = 2e-3;

/// The fp8 formats of the left and the right operand of matmuls in the forward pass, in the
/// backward pass, and for Conv1D weight gradients.
const OPERAND_FORMATS: [[Fp8Format; 2]; 3] = [
    [Fp8Format::E4M3, Fp8Format::E4M3],
    [Fp8Format::E5M2, Fp8Format::E4M3],
    [Fp8Format::E4M3, Fp8Format::E5M2],
];

/// Compares fp8 matmuls on the GPU with the CPU as the reference, for operands in every layout and
/// results of every type.
pub(super) fn compare_matmuls(backends: &Backends, seed: u64, m: usize, n: usize, k: usize) -> CaseResult {
    let mut errors = MaxErrors::default();
    let mut rng = CaseRng::new(seed);
    for write in [WriteMode::Overwrite, WriteMode::Accumulate] {
        for (i, [left, right]) in OPERAND_FORMATS.into_iter().enumerate() {
            let buffers = [
                make_buffer_of_tested_type(rng.draw_initial_output(write, m * n)),
                make_f32_buffer(rng.draw_initial_output(write, m * n)),
                make_buffer_of_tested_type(rng.draw_vector(m * k)),
                make_buffer_of_tested_type(rng.draw_vector(k * n)),
            ];
            let case = format!("fp8 {left:?} {right:?} {m} {n} {k} {write:?}");
            errors += backends.compare_with_min_tolerance(
                SUM_TOLERANCE,
                &case,
                buffers,
                |ops, [c, c32, a, b]| {
                    let a = Fp8Operand { x: a.view(), format: left, transposed: i == 1 };
                    let b = Fp8Operand { x: b.view(), format: right, transposed: i == 0 };
                    ops.fp8_matmul(c.view_mut(), a, b, m, n, k, write);
                    ops.fp8_matmul(c32.view_mut(), a, b, m, n, k, write);
                },
            )?;
        }
    }
    Ok(errors)
}

/// Compares the rounding of every bf16 number to fp8 on the GPU bit by bit with the CPU, in
/// matrices of several magnitudes. A matmul with the identity matrix returns the rounded operand.
pub(super) fn compare_operand_rounding(backends: &Backends) -> CaseResult {
    let n = FP8_COLUMN_MULTIPLE;
    let identity: Vec<f32> = (0..n * n).map(|i| f32::from(u8::from(i % (n + 1) == 0))).collect();
    let finite = |limit: f32| {
        let bf16 = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16));
        bf16.filter(|x| x.abs() <= limit).collect::<Vec<f32>>()
    };
    // The maxima give the scale 1 in each format, scales below the smallest, and subnormal
    // elements.
    let mut inputs: Vec<Vec<f32>> = [448.0, 57344.0, 1e-18, 1e-37].map(finite).to_vec();
    inputs.push(vec![f32::NAN, 1.0, f32::INFINITY, 2.0, -f32::INFINITY]);
    for (format, values) in
        [Fp8Format::E4M3, Fp8Format::E5M2].into_iter().flat_map(|k| inputs.iter().map(move |v| (k, v)))
    {
        // Values that are not finite get separate rows, because they turn every sum into NaN.
        let width = if values.iter().all(|x| x.is_finite()) { n } else { 1 };
        let m = values.len().div_ceil(width);
        let mut x = vec![0.0; m * n];
        for (row, chunk) in x.chunks_mut(n).zip(values.chunks(width)) {
            row[..chunk.len()].copy_from_slice(chunk);
        }
        let run = |ops: &dyn Ops| {
            let [x, identity] = [&x, &identity].map(|v| ops.clone_to_device(v[..].into()));
            let mut c = ops.clone_to_device(Buf::from_slice(&make_nan_values(m * n)).view());
            let x = Fp8Operand { x: x.view(), format, transposed: false };
            let identity = Fp8Operand { x: identity.view(), format: Fp8Format::E4M3, transposed: false };
            ops.fp8_matmul(c.view_mut(), x, identity, m, n, n, WriteMode::Overwrite);
            ops.clone_to_host(c.view()).host_slice().to_vec()
        };
        let (expected, actual) = (run(&backends.cpu), run(backends.cuda));
        let same = |(w, g): (&f32, &f32)| w == g || (w.is_nan() && g.is_nan());
        if let Some(at) = expected.iter().zip(&actual).position(|pair| !same(pair)) {
            return Err(ConformanceError::Fp8RoundingDiffers {
                format,
                input: x[at],
                gpu: actual[at],
                cpu: expected[at],
            });
        }
    }
    Ok(MaxErrors::default())
}
