//! Products in fp8, as the reference for cards: operands are rounded to fp8 and widened again, then multiplied as bfloat16 are.
//!
//! A number of fp8 times its scale is a bfloat16 exactly: it has at most four significant bits, and scales are 2⁻⁶⁰ at least. (What
//! rounds up to 2¹²⁸, from 2¹²⁸ · 15/16 on, becomes infinite.)
use super::half::{In, Kind, f32_to_bf16};
use super::matmul::{Product, product_to};
use super::pack::Operand;
use super::pool::Parts;
use super::{Cpu, Out};
use crate::mem::ViewMut;
use crate::ops::{Fp8Matrix, Write, check_fp8};

/// Elements of a task.
const CHUNK: usize = 16 << 10;

/// [`crate::Ops::fp8_product`]
pub(super) fn product(
    cpu: &Cpu,
    c: ViewMut,
    a: Fp8Matrix,
    b: Fp8Matrix,
    [m, n, k]: [usize; 3],
    write: Write,
) {
    check_fp8(c.len(), &a, &b, [m, n, k]);
    let mut rooms = [m * k, k * n].map(|len| cpu.scratch.take(len.div_ceil(2)));
    let [room_a, room_b] = &mut rooms;
    let (in_a, in_b) = (rounded(cpu, room_a, a), rounded(cpu, room_b, b));
    let (row, depth) = if a.transposed { (1, m) } else { (k, 1) };
    let a = Operand { data: in_a, row, depth };
    let (row, depth) = if b.transposed { (k, 1) } else { (1, n) };
    let b = Operand { data: in_b, row, depth };
    product_to(cpu, Out::new(cpu, c), a, b, Product { m, n, k, ldc: n, write });
}

/// The matrix as fp8 keeps it, in `room`, where two bfloat16 lie in each `f32`.
fn rounded<'a>(cpu: &Cpu, room: &'a mut [f32], matrix: Fp8Matrix) -> In<'a> {
    let (x, kind) = (In::from(matrix.x), matrix.kind);
    let scale = kind.scale(amax(cpu, x));
    let to = &mut bytemuck::cast_slice_mut(room)[..x.len()];
    let parts = Parts::new(&mut *to);
    cpu.pool.run(x.len().div_ceil(CHUNK), &|task| {
        let range = task * CHUNK..((task + 1) * CHUNK).min(x.len());
        // SAFETY: ranges of different tasks are apart.
        let to = unsafe { parts.part(range.clone()) };
        for (to, x) in to.iter_mut().zip(x.part(cpu, range).iter()) {
            *to = f32_to_bf16(kind.decode(kind.encode(x / scale)) * scale);
        }
    });
    In::Half(Kind::Bf16, to)
}

/// The largest magnitude of the finite elements; 0 without any.
fn amax(cpu: &Cpu, x: In) -> f32 {
    let tasks = x.len().div_ceil(CHUNK);
    let mut most = cpu.scratch.take(tasks);
    let parts = Parts::new(&mut most[..tasks]);
    cpu.pool.run(tasks, &|task| {
        let range = task * CHUNK..((task + 1) * CHUNK).min(x.len());
        let finite = |x: &f32| if x.is_finite() { x.abs() } else { 0.0 };
        // SAFETY: an element for each task.
        let most = unsafe { parts.part(task..task + 1) };
        most[0] = x.part(cpu, range).iter().map(finite).fold(0.0, f32::max);
    });
    most[..tasks].iter().copied().fold(0.0, f32::max)
}
