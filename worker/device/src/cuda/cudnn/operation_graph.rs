//! Builds a graph of cuDNN's operations on four-dimensional tensors ([`OperationGraph`]).
use super::super::bindings::CudnnApi;
use super::super::bindings::cudnn_sys::{
    cudnnBackendAttributeName_t::{self, *},
    cudnnBackendDescriptorType_t::{self, *},
    cudnnDataType_t::{self, *},
    cudnnPointwiseMode_t::{self, *},
    cudnnReduceTensorOp_t,
};
use super::super::error::Result;
use super::descriptor::Descriptor;
use std::sync::Arc;

/// Alignment in bytes that this program declares to cuDNN for all tensors in GPU memory.
pub(super) const ALIGNMENT: i64 = 16;
/// Smallest id for intermediate results that are never stored in memory (virtual tensors) in a
/// graph of cuDNN operations.
const FIRST_VIRTUAL_ID: i64 = 100;

/// Where the elements of a tensor are stored: in GPU memory, on the host, or nowhere (a virtual
/// tensor).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TensorLocation {
    /// The elements are in GPU memory, at the address that is bound to this id.
    Device(i64),
    /// The tensor is one `f32` on the host. Its value is bound to this id and read when the graph
    /// runs.
    Host(i64),
    /// The elements are not stored. The tensor is the result of one operation and the operand of
    /// others.
    Virtual,
}

/// A tensor of a cuDNN operation graph, which operations read or write.
#[derive(Clone, Copy, Debug)]
pub(super) struct GraphTensor {
    index: usize,
    dims: [i64; 4],
    strides: [i64; 4],
}

/// A graph of cuDNN operations that is being built.
pub(super) struct OperationGraph {
    pub(super) library: Arc<CudnnApi>,
    tensors: Vec<Descriptor>,
    /// The operations, in the order in which they were added.
    pub(super) operations: Vec<Descriptor>,
}

/// Returns the strides, in elements, of a contiguous tensor with these dimensions.
pub(super) fn compute_packed_strides([_, h, s, d]: [i64; 4]) -> [i64; 4] {
    [h * s * d, s * d, d, 1]
}

impl OperationGraph {
    /// Creates a graph of cuDNN operations that has no operations yet.
    pub(super) fn new(library: &Arc<CudnnApi>) -> Self {
        OperationGraph { library: library.clone(), tensors: Vec::new(), operations: Vec::new() }
    }

    /// Adds a tensor with the given dimensions, strides (in elements) and location to the graph of
    /// cuDNN operations.
    pub(super) fn add_tensor(
        &mut self,
        location: TensorLocation,
        data_type: cudnnDataType_t,
        dims: [i64; 4],
        strides: [i64; 4],
    ) -> Result<GraphTensor> {
        let index = self.tensors.len();
        let id = match location {
            TensorLocation::Device(id) | TensorLocation::Host(id) => id,
            TensorLocation::Virtual => FIRST_VIRTUAL_ID + index as i64,
        };
        let descriptor = Descriptor::new(&self.library, CUDNN_BACKEND_TENSOR_DESCRIPTOR)?
            .set_attribute(CUDNN_ATTR_TENSOR_DATA_TYPE, &[data_type])?
            .set_attribute(CUDNN_ATTR_TENSOR_DIMENSIONS, &dims)?
            .set_attribute(CUDNN_ATTR_TENSOR_STRIDES, &strides)?
            .set_attribute(CUDNN_ATTR_TENSOR_UNIQUE_ID, &[id])?
            .set_attribute(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[ALIGNMENT])?
            .set_attribute(CUDNN_ATTR_TENSOR_IS_VIRTUAL, &[location == TensorLocation::Virtual])?
            .set_attribute(CUDNN_ATTR_TENSOR_IS_BY_VALUE, &[matches!(location, TensorLocation::Host(_))])?;
        self.tensors.push(descriptor.finalize()?);
        Ok(GraphTensor { index, dims, strides })
    }

    /// Adds an intermediate result that cuDNN need not store in memory (a virtual tensor) to the
    /// graph of cuDNN operations, and returns it.
    pub(super) fn add_virtual_tensor(
        &mut self,
        data_type: cudnnDataType_t,
        dims: [i64; 4],
    ) -> Result<GraphTensor> {
        self.add_tensor(TensorLocation::Virtual, data_type, dims, compute_packed_strides(dims))
    }

    /// Adds an `f32` scalar in host memory to the graph of cuDNN operations, under the id `id`;
    /// cuDNN reads the scalar whenever the graph runs.
    pub(super) fn add_host_scalar(&mut self, id: i64) -> Result<GraphTensor> {
        self.add_tensor(TensorLocation::Host(id), CUDNN_DATA_FLOAT, [1; 4], [1; 4])
    }

    /// Adds a cuDNN operation on `tensors` to the graph. `descriptor` has the operation's settings,
    /// if the operation has any.
    fn add_operation(
        &mut self,
        kind: cudnnBackendDescriptorType_t,
        descriptor: Option<(cudnnBackendAttributeName_t, Descriptor)>,
        tensors: &[(cudnnBackendAttributeName_t, GraphTensor)],
    ) -> Result<()> {
        let mut operation = Descriptor::new(&self.library, kind)?;
        if let Some((attribute, descriptor)) = descriptor {
            operation = operation.set_attribute(attribute, &[descriptor.finalize()?.handle()])?;
        }
        for (attribute, tensor) in tensors {
            operation = operation.set_attribute(*attribute, &[self.tensors[tensor.index].handle()])?;
        }
        self.operations.push(operation.finalize()?);
        Ok(())
    }

    /// Adds an elementwise cuDNN operation of the kind `mode` to the graph, with `tensors` as its
    /// operands and result. Only the mode that computes indices has an axis.
    fn add_elementwise(
        &mut self,
        mode: cudnnPointwiseMode_t,
        precision: cudnnDataType_t,
        axis: Option<i64>,
        tensors: &[(cudnnBackendAttributeName_t, GraphTensor)],
    ) -> Result<()> {
        let mut descriptor = Descriptor::new(&self.library, CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?
            .set_attribute(CUDNN_ATTR_POINTWISE_MODE, &[mode])?
            .set_attribute(CUDNN_ATTR_POINTWISE_MATH_PREC, &[precision])?;
        if let Some(axis) = axis {
            descriptor = descriptor.set_attribute(CUDNN_ATTR_POINTWISE_AXIS, &[axis])?;
        }
        let descriptor = Some((CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, descriptor));
        self.add_operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, descriptor, tensors)
    }

    /// Adds the elementwise operation `y = mode(x, b)`, such as a sum, to the graph of cuDNN
    /// operations. Modes with one operand have no `b`.
    pub(super) fn add_pointwise(
        &mut self,
        mode: cudnnPointwiseMode_t,
        x: GraphTensor,
        b: Option<GraphTensor>,
        y: GraphTensor,
    ) -> Result<()> {
        let is_comparison = matches!(mode, CUDNN_POINTWISE_CMP_GT | CUDNN_POINTWISE_CMP_GE);
        let precision = if is_comparison { CUDNN_DATA_BOOLEAN } else { CUDNN_DATA_FLOAT };
        let mut tensors =
            vec![(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x), (CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y)];
        tensors.extend(b.map(|b| (CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b)));
        self.add_elementwise(mode, precision, None, &tensors)
    }

    /// Adds the elementwise operation `mode(x, b)`, such as a sum, to the graph of cuDNN
    /// operations, and returns the result as a new tensor. The result is a virtual tensor with the
    /// dimensions of `x`.
    pub(super) fn add_pointwise_result(
        &mut self,
        mode: cudnnPointwiseMode_t,
        data_type: cudnnDataType_t,
        x: GraphTensor,
        b: Option<GraphTensor>,
    ) -> Result<GraphTensor> {
        let y = self.add_virtual_tensor(data_type, x.dims)?;
        self.add_pointwise(mode, x, b, y)?;
        Ok(y)
    }

    /// Adds the cuDNN operation that computes for each element of `x` its index along the dimension
    /// `axis`, and returns the tensor of these indices.
    pub(super) fn add_index_along_axis(&mut self, x: GraphTensor, axis: i64) -> Result<GraphTensor> {
        let y = self.add_virtual_tensor(CUDNN_DATA_INT32, x.dims)?;
        let tensors = [(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x), (CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y)];
        self.add_elementwise(CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_FLOAT, Some(axis), &tensors)?;
        Ok(y)
    }

    /// Adds the operation that selects elements of `x` where `condition` is true and of `other`
    /// elsewhere, and returns the tensor of the result.
    pub(super) fn add_select(
        &mut self,
        condition: GraphTensor,
        x: GraphTensor,
        other: GraphTensor,
    ) -> Result<GraphTensor> {
        let y = self.add_virtual_tensor(CUDNN_DATA_FLOAT, x.dims)?;
        let tensors = [
            (CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x),
            (CUDNN_ATTR_OPERATION_POINTWISE_BDESC, other),
            (CUDNN_ATTR_OPERATION_POINTWISE_TDESC, condition),
            (CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y),
        ];
        self.add_elementwise(CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT, None, &tensors)?;
        Ok(y)
    }

    /// Adds the matmul `c = a · b` over the last two dimensions to the graph of cuDNN operations.
    /// If `b` has fewer heads than `a`, several heads of `a` share one head of `b`.
    pub(super) fn add_matmul(&mut self, a: GraphTensor, b: GraphTensor, c: GraphTensor) -> Result<()> {
        let descriptor = Descriptor::new(&self.library, CUDNN_BACKEND_MATMUL_DESCRIPTOR)?
            .set_attribute(CUDNN_ATTR_MATMUL_COMP_TYPE, &[CUDNN_DATA_FLOAT])?;
        self.add_operation(
            CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR,
            Some((CUDNN_ATTR_OPERATION_MATMUL_DESC, descriptor)),
            &[
                (CUDNN_ATTR_OPERATION_MATMUL_ADESC, a),
                (CUDNN_ATTR_OPERATION_MATMUL_BDESC, b),
                (CUDNN_ATTR_OPERATION_MATMUL_CDESC, c),
            ],
        )
    }

    /// Adds a reduction to the graph of cuDNN operations, which combines the elements of `x` to `y`
    /// along each dimension that has length 1 in `y`.
    pub(super) fn add_reduce(
        &mut self,
        operator: cudnnReduceTensorOp_t,
        x: GraphTensor,
        y: GraphTensor,
    ) -> Result<()> {
        let descriptor = Descriptor::new(&self.library, CUDNN_BACKEND_REDUCTION_DESCRIPTOR)?
            .set_attribute(CUDNN_ATTR_REDUCTION_OPERATOR, &[operator])?
            .set_attribute(CUDNN_ATTR_REDUCTION_COMP_TYPE, &[CUDNN_DATA_FLOAT])?;
        self.add_operation(
            CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR,
            Some((CUDNN_ATTR_OPERATION_REDUCTION_DESC, descriptor)),
            &[(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x), (CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y)],
        )
    }

    /// Adds the cuDNN operation that transposes the last two dimensions of `x`, and returns its
    /// result with elements of the type `data_type`.
    pub(super) fn add_transpose(
        &mut self,
        data_type: cudnnDataType_t,
        x: GraphTensor,
    ) -> Result<GraphTensor> {
        let swap = |[b, h, s, d]: [i64; 4]| [b, h, d, s];
        let y = self.add_tensor(TensorLocation::Virtual, data_type, swap(x.dims), swap(x.strides))?;
        self.add_operation(
            CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR,
            None,
            &[(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x), (CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y)],
        )?;
        Ok(y)
    }
}
