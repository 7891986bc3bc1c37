//! Matmuls on a GPU whose operands may have any element types ([`MatmulOperand`]). Chooses the type
//! that cuBLASLt computes with, and converts operands and results.
use super::backend::Cuda;
use super::bindings::Address;
use super::elementwise::convert_elements;
use super::matmul::{Epilogue, Matmul, MatrixRef, OperandFormat, VaryingSize};
use super::memory::DeviceMemory;
use super::tensor_arg::{TensorArg, dtype_code, gpu_address};
use crate::buffer::{Dtype, View, ViewMut};
use crate::ops::{BiasOps, WriteMode, expect_len};

/// Operand or result of a matmul in GPU memory: its address, element type and layout.
#[derive(Clone, Copy)]
pub(super) struct MatmulOperand {
    pub(super) at: Address,
    pub(super) dtype: Dtype,
    /// Number of elements from row to row in memory.
    pub(super) stride: usize,
    /// True if the matrix is stored transposed.
    pub(super) transposed: bool,
}

impl MatmulOperand {
    /// Creates a matmul operand from a matrix in GPU memory whose rows begin `stride` elements
    /// apart. Panics if the view is in host memory.
    #[track_caller]
    pub(super) fn from_rows(v: View, stride: usize) -> Self {
        MatmulOperand { at: gpu_address(v), dtype: v.dtype(), stride, transposed: false }
    }

    /// Creates a matmul operand from the transpose of a matrix in GPU memory whose stored rows
    /// begin `stride` elements apart. Panics if the view is in host memory.
    #[track_caller]
    pub(super) fn from_transposed(v: View, stride: usize) -> Self {
        MatmulOperand { transposed: true, ..Self::from_rows(v, stride) }
    }

    /// Returns the operand's address, row stride and transposition as a [`MatrixRef`], without the
    /// element type.
    pub(super) fn to_matrix_ref(self) -> MatrixRef {
        MatrixRef { at: self.at, stride: self.stride, transposed: self.transposed }
    }

    /// Returns the operand's address and element type as a kernel argument, without its layout.
    fn to_tensor_arg(self) -> TensorArg {
        TensorArg { at: self.at, dtype: dtype_code(self.dtype) }
    }

    /// Returns true if some row of the operand begins at a GPU address that is not a multiple of 16
    /// bytes.
    fn is_unaligned(&self) -> bool {
        !self.at.is_multiple_of(16) || !(self.stride * self.dtype.size()).is_multiple_of(16)
    }
}

/// Computes the matmul `c[m, n] (=|+=) a[m, k] · b[k, n]` on the GPU. `sizes` is `[m, n, k]`.
///
/// cuBLASLt needs operands of one type and a result of that type or f32. If one operand is bf16 and
/// the other f32, the f32 operand is rounded to bf16, so that tensor cores are used. This affects
/// the gradient of the residual stream, which is f32 while weights and activations are bf16.
/// Operands with other combinations of types are converted to f32.
pub(super) fn matmul(
    cuda: &Cuda,
    c: MatmulOperand,
    a: MatmulOperand,
    b: MatmulOperand,
    sizes: [usize; 3],
    write: WriteMode,
) {
    matmul_with_varying_size(cuda, [c, a, b], sizes, write, None);
}

/// Computes the matmul `c[m, n] (=|+=) a[m, k] · b[k, n]` on the GPU; `varying` names the size that
/// changes from call to call, if any.
pub(super) fn matmul_with_varying_size(
    cuda: &Cuda,
    operands: [MatmulOperand; 3],
    sizes: [usize; 3],
    write: WriteMode,
    varying: Option<VaryingSize>,
) {
    let [c, a, b] = operands;
    if finish_empty_matmul(cuda, c, sizes, write) {
        return;
    }
    let dtype = select_operand_type(a.dtype, b.dtype);
    if !matmul_with_operand_type(dtype, cuda, operands, sizes, write, varying) {
        matmul_with_operand_type(Dtype::F32, cuda, operands, sizes, write, varying);
    }
}

/// Computes a matmul on the GPU after converting both operands to the element type `dtype`. Returns
/// false without computing anything if the operands are 16-bit and unaligned and cuBLASLt has no
/// algorithm for them.
fn matmul_with_operand_type(
    dtype: Dtype,
    cuda: &Cuda,
    [c, a, b]: [MatmulOperand; 3],
    [m, n, k]: [usize; 3],
    write: WriteMode,
    varying: Option<VaryingSize>,
) -> bool {
    // The memory of converted operands lives until the matmul is enqueued.
    let (a, _a_memory) = convert_operand(cuda, a, dtype, [m, k]);
    let (b, _b_memory) = convert_operand(cuda, b, dtype, [k, n]);
    let add = write == WriteMode::Accumulate;
    let request = |c: MatmulOperand, add| {
        let (output, [a, b, c]) = (c.dtype, [a, b, c].map(MatmulOperand::to_matrix_ref));
        let (inputs, epilogue) = (OperandFormat::Same(dtype), Epilogue::None);
        Matmul { m, n, k, a, b, c, inputs, output, add, epilogue, varying }
    };
    let is_direct = c.dtype == Dtype::F32 || c.dtype == dtype;
    let result = if is_direct { c } else { MatmulOperand { dtype: Dtype::F32, ..c } };
    if dtype != Dtype::F32
        && [a, b, result].iter().any(|x| x.is_unaligned())
        && !cuda.has_matmul_algorithm(&request(result, add))
    {
        return false;
    }
    if is_direct {
        cuda.enqueue_matmul(&request(c, add));
    } else {
        run_with_f32_result(cuda, c, m * n, add, |c, add| cuda.enqueue_matmul(&request(c, add)));
    }
    true
}

/// Returns the element type to which the two operands of a matmul are converted: their common type,
/// bf16 if one is f32 and one bf16, otherwise f32.
fn select_operand_type(a: Dtype, b: Dtype) -> Dtype {
    match (a, b) {
        _ if a == b => a,
        (Dtype::F32, Dtype::Bf16) | (Dtype::Bf16, Dtype::F32) => Dtype::Bf16,
        _ => Dtype::F32,
    }
}

/// Computes the matmul with bias `y[m, n] = a[m, k] · b[k, n] + bias[n]` on the GPU.
///
/// cuBLASLt adds the bias and rounds the result once if everything has one type, the bias is
/// aligned to 16 bytes, and no matrix is a vector. Otherwise a kernel adds the bias to the rounded
/// result of the matmul.
pub(super) fn matmul_with_bias(
    cuda: &Cuda,
    y: ViewMut,
    a: MatmulOperand,
    b: MatmulOperand,
    bias: View,
    [m, n, k]: [usize; 3],
) {
    expect_len("matmul with bias", "bias", bias.len(), n);
    let c = MatmulOperand::from_rows(y.as_view(), n);
    let run_separately = move || {
        matmul(cuda, c, a, b, [m, n, k], WriteMode::Overwrite);
        cuda.bias_forward(y, bias, m, n);
    };
    let one_type = [b.dtype, c.dtype, bias.dtype()].iter().all(|dtype| *dtype == a.dtype);
    if !one_type || m < 2 || n < 2 || k == 0 || !gpu_address(bias).is_multiple_of(16) {
        return run_separately();
    }
    if !matmul_with_epilogue(cuda, [c, a, b], Epilogue::Bias(gpu_address(bias)), [m, n, k]) {
        run_separately();
    }
}

/// Computes the matmul `c[m, n] = a[m, k] · b[k, n]` and its epilogue on the GPU. `a` and `b` must
/// have one type. Returns false without computing anything if cuBLASLt has no algorithm.
pub(super) fn matmul_with_epilogue(
    cuda: &Cuda,
    [c, a, b]: [MatmulOperand; 3],
    epilogue: Epilogue,
    [m, n, k]: [usize; 3],
) -> bool {
    let (inputs, output) = (OperandFormat::Same(a.dtype), c.dtype);
    let [a, b, c] = [a, b, c].map(MatmulOperand::to_matrix_ref);
    let request = Matmul { m, n, k, a, b, c, inputs, output, add: false, epilogue, varying: None };
    let has_algorithm = cuda.has_matmul_algorithm(&request);
    if has_algorithm {
        cuda.enqueue_matmul(&request);
    }
    has_algorithm
}

/// Handles a matmul with an empty dimension (`m`, `n` or `k` is 0) without cuBLASLt, by writing
/// zeros to `c` if necessary. Returns true if a size is 0, otherwise returns false without doing
/// anything.
pub(super) fn finish_empty_matmul(
    cuda: &Cuda,
    c: MatmulOperand,
    [m, n, k]: [usize; 3],
    write: WriteMode,
) -> bool {
    let len = m * n;
    if len > 0 && k == 0 && write == WriteMode::Overwrite {
        cuda.gpu.call_and_record_failure(|| cuda.gpu.enqueue_zero_fill(c.at, len * c.dtype.size()));
    }
    len == 0 || k == 0
}

/// Computes a matmul with the function `run`, which can write only f32, and converts the result to
/// the element type of `c`.
///
/// `run` receives f32 scratch memory with the layout of `c`, and the flag `add`. If `add` is false,
/// `run` must overwrite the scratch memory with the matmul. If `add` is true, the scratch memory
/// contains the values of `c`, and `run` must add the matmul to them. Afterwards the content of the
/// scratch memory is converted to the type of `c` and overwrites `c`.
pub(super) fn run_with_f32_result(
    cuda: &Cuda,
    c: MatmulOperand,
    len: usize,
    add: bool,
    run: impl Fn(MatmulOperand, bool),
) {
    let memory = cuda.alloc_scratch(len * size_of::<f32>());
    let sum = MatmulOperand { at: memory.address(), dtype: Dtype::F32, ..c };
    if add {
        convert_elements(cuda, sum.to_tensor_arg(), c.to_tensor_arg(), len);
    }
    run(sum, add);
    convert_elements(cuda, c.to_tensor_arg(), sum.to_tensor_arg(), len);
}

/// Converts the matmul operand `x` to the element type `dtype` in newly allocated GPU memory.
/// Returns the operand and this memory. The caller must keep that memory until the matmul is
/// enqueued. Returns `x` itself and no memory if `x` has the type already.
fn convert_operand(
    cuda: &Cuda,
    x: MatmulOperand,
    dtype: Dtype,
    [rows, columns]: [usize; 2],
) -> (MatmulOperand, Option<DeviceMemory>) {
    if x.dtype == dtype {
        return (x, None);
    }
    // including the elements between rows
    let (rows, columns) = if x.transposed { (columns, rows) } else { (rows, columns) };
    let len = (rows - 1) * x.stride + columns;
    let memory = cuda.alloc_scratch(len * dtype.size());
    let converted = MatmulOperand { at: memory.address(), dtype, ..x };
    convert_elements(cuda, converted.to_tensor_arg(), x.to_tensor_arg(), len);
    (converted, Some(memory))
}
