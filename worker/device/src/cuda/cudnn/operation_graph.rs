//! [`OperationGraph`]: builds a graph of cuDNN's operations on tensors of four dimensions.
use super::super::bindings::CudnnApi;
use super::super::error::Result;
use super::descriptor::{Attribute as A, DataType, Descriptor, DescriptorType, PointwiseMode, Reduction};
use std::sync::Arc;

/// Alignment in bytes that cuDNN may assume for tensors in GPU memory.
pub(super) const ALIGNMENT: i64 = 16;
/// The first id of virtual tensors.
const FIRST_VIRTUAL_ID: i64 = 100;

/// Storage of a tensor's elements.
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

/// A tensor of an operation graph, as an operand or a result of operations.
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
    /// Creates a graph without operations.
    pub(super) fn new(library: &Arc<CudnnApi>) -> Self {
        OperationGraph { library: library.clone(), tensors: Vec::new(), operations: Vec::new() }
    }

    /// Adds a tensor with these dimensions and strides (in elements) to the graph.
    pub(super) fn add_tensor(
        &mut self,
        location: TensorLocation,
        data_type: DataType,
        dims: [i64; 4],
        strides: [i64; 4],
    ) -> Result<GraphTensor> {
        let index = self.tensors.len();
        let id = match location {
            TensorLocation::Device(id) | TensorLocation::Host(id) => id,
            TensorLocation::Virtual => FIRST_VIRTUAL_ID + index as i64,
        };
        let descriptor = Descriptor::new(&self.library, DescriptorType::Tensor)?
            .set_data_type(A::TensorType, data_type)?
            .set_ints(A::TensorDims, &dims)?
            .set_ints(A::TensorStrides, &strides)?
            .set_ints(A::TensorId, &[id])?
            .set_ints(A::TensorAlignment, &[ALIGNMENT])?
            .set_bool(A::TensorVirtual, location == TensorLocation::Virtual)?
            .set_bool(A::TensorByValue, matches!(location, TensorLocation::Host(_)))?;
        self.tensors.push(descriptor.finalize(DescriptorType::Tensor)?);
        Ok(GraphTensor { index, dims, strides })
    }

    /// Adds a contiguous virtual tensor to the graph.
    pub(super) fn add_virtual_tensor(&mut self, data_type: DataType, dims: [i64; 4]) -> Result<GraphTensor> {
        self.add_tensor(TensorLocation::Virtual, data_type, dims, compute_packed_strides(dims))
    }

    /// Adds a tensor of one `f32` on the host to the graph. Its value is bound to `id`.
    pub(super) fn add_host_scalar(&mut self, id: i64) -> Result<GraphTensor> {
        self.add_tensor(TensorLocation::Host(id), DataType::F32, [1; 4], [1; 4])
    }

    /// Adds an operation with its tensors, and with its descriptor if it has one.
    fn add_operation(
        &mut self,
        kind: DescriptorType,
        descriptor: Option<(A, &Descriptor)>,
        tensors: &[(A, GraphTensor)],
    ) -> Result<()> {
        let mut operation = Descriptor::new(&self.library, kind)?;
        if let Some((attribute, descriptor)) = descriptor {
            operation = operation.set_descriptor(attribute, descriptor)?;
        }
        for (attribute, tensor) in tensors {
            operation = operation.set_descriptor(*attribute, &self.tensors[tensor.index])?;
        }
        self.operations.push(operation.finalize(kind)?);
        Ok(())
    }

    /// Adds the operation `y = mode(x, b)`. Modes with one operand have no `b`.
    pub(super) fn add_pointwise(
        &mut self,
        mode: PointwiseMode,
        x: GraphTensor,
        b: Option<GraphTensor>,
        y: GraphTensor,
    ) -> Result<()> {
        let is_comparison = matches!(mode, PointwiseMode::Greater | PointwiseMode::GreaterEqual);
        let precision = if is_comparison { DataType::Boolean } else { DataType::F32 };
        let descriptor = Descriptor::new(&self.library, DescriptorType::Pointwise)?
            .set_pointwise_mode(mode)?
            .set_data_type(A::PointwisePrecision, precision)?
            .finalize(DescriptorType::Pointwise)?;
        let mut tensors = vec![(A::PointwiseX, x), (A::PointwiseY, y)];
        tensors.extend(b.map(|b| (A::PointwiseB, b)));
        self.add_operation(
            DescriptorType::PointwiseOperation,
            Some((A::PointwiseDescriptor, &descriptor)),
            &tensors,
        )
    }

    /// Adds the operation `mode(x, b)` and returns its result, a virtual tensor with the dimensions
    /// of `x`.
    pub(super) fn add_apply(
        &mut self,
        mode: PointwiseMode,
        data_type: DataType,
        x: GraphTensor,
        b: Option<GraphTensor>,
    ) -> Result<GraphTensor> {
        let y = self.add_virtual_tensor(data_type, x.dims)?;
        self.add_pointwise(mode, x, b, y)?;
        Ok(y)
    }

    /// Adds the operation that computes the index of each element of `x` along `axis`, and returns
    /// its result, a virtual tensor of integers.
    pub(super) fn add_index(&mut self, x: GraphTensor, axis: i64) -> Result<GraphTensor> {
        let y = self.add_virtual_tensor(DataType::I32, x.dims)?;
        let descriptor = Descriptor::new(&self.library, DescriptorType::Pointwise)?
            .set_pointwise_mode(PointwiseMode::Index)?
            .set_ints(A::PointwiseAxis, &[axis])?
            .set_data_type(A::PointwisePrecision, DataType::F32)?
            .finalize(DescriptorType::Pointwise)?;
        self.add_operation(
            DescriptorType::PointwiseOperation,
            Some((A::PointwiseDescriptor, &descriptor)),
            &[(A::PointwiseX, x), (A::PointwiseY, y)],
        )?;
        Ok(y)
    }

    /// Adds the operation that selects `x` where `condition` is true, otherwise `other`. Returns
    /// its result, a virtual tensor.
    pub(super) fn add_select(
        &mut self,
        condition: GraphTensor,
        x: GraphTensor,
        other: GraphTensor,
    ) -> Result<GraphTensor> {
        let y = self.add_virtual_tensor(DataType::F32, x.dims)?;
        let descriptor = Descriptor::new(&self.library, DescriptorType::Pointwise)?
            .set_pointwise_mode(PointwiseMode::Select)?
            .set_data_type(A::PointwisePrecision, DataType::F32)?
            .finalize(DescriptorType::Pointwise)?;
        let tensors =
            [(A::PointwiseX, x), (A::PointwiseB, other), (A::PointwiseT, condition), (A::PointwiseY, y)];
        self.add_operation(
            DescriptorType::PointwiseOperation,
            Some((A::PointwiseDescriptor, &descriptor)),
            &tensors,
        )?;
        Ok(y)
    }

    /// Adds the matmul `c = a · b` over the last two dimensions. If `b` has fewer heads than `a`,
    /// several heads of `a` share one head of `b`.
    pub(super) fn add_matmul(&mut self, a: GraphTensor, b: GraphTensor, c: GraphTensor) -> Result<()> {
        let descriptor = Descriptor::new(&self.library, DescriptorType::Matmul)?
            .set_data_type(A::MatmulPrecision, DataType::F32)?
            .finalize(DescriptorType::Matmul)?;
        self.add_operation(
            DescriptorType::MatmulOperation,
            Some((A::MatmulDescriptor, &descriptor)),
            &[(A::MatmulA, a), (A::MatmulB, b), (A::MatmulC, c)],
        )
    }

    /// Adds the operation that reduces `x` to `y`, over the dimensions in which `y` is smaller.
    pub(super) fn add_reduce(&mut self, operator: Reduction, x: GraphTensor, y: GraphTensor) -> Result<()> {
        let descriptor = Descriptor::new(&self.library, DescriptorType::Reduction)?
            .set_reduction(operator)?
            .set_data_type(A::ReductionPrecision, DataType::F32)?
            .finalize(DescriptorType::Reduction)?;
        self.add_operation(
            DescriptorType::ReductionOperation,
            Some((A::ReductionDescriptor, &descriptor)),
            &[(A::ReductionX, x), (A::ReductionY, y)],
        )
    }

    /// Adds the operation that exchanges the last two dimensions of `x`, and returns its result, a
    /// virtual tensor of type `data_type`.
    pub(super) fn add_transpose(&mut self, data_type: DataType, x: GraphTensor) -> Result<GraphTensor> {
        let swap = |[b, h, s, d]: [i64; 4]| [b, h, d, s];
        let y = self.add_tensor(TensorLocation::Virtual, data_type, swap(x.dims), swap(x.strides))?;
        self.add_operation(DescriptorType::ReshapeOperation, None, &[(A::ReshapeX, x), (A::ReshapeY, y)])?;
        Ok(y)
    }
}
