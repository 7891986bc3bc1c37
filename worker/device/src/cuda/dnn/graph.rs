//! A graph of operations while it is made: tensors of four dimensions, and what becomes of them.
use super::super::binding::Dnn as Library;
use super::super::error::Result;
use super::descriptor::{Attribute as A, Descriptor, Kind, Mode, Reduction, Type};
use std::sync::Arc;

/// Bytes at whose multiples tensors begin.
pub(super) const ALIGNMENT: i64 = 16;
/// Numbers of tensors that nobody names begin here.
const UNNAMED: i64 = 100;

/// Where a tensor's elements are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In the card's memory; by this number it is found.
    Memory(i64),
    /// One `f32` of the host, read when the graph is run.
    Host(i64),
    /// Nowhere: between two operations.
    Virtual,
}

/// A tensor of the graph.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tensor {
    index: usize,
    pub(super) dims: [i64; 4],
    pub(super) strides: [i64; 4],
}

pub(super) struct Graph {
    pub(super) library: Arc<Library>,
    tensors: Vec<Descriptor>,
    /// In their order.
    pub(super) operations: Vec<Descriptor>,
}

/// Strides of a tensor whose elements follow one another.
pub(super) fn packed([_, h, s, d]: [i64; 4]) -> [i64; 4] {
    [h * s * d, s * d, d, 1]
}

impl Graph {
    pub(super) fn new(library: &Arc<Library>) -> Self {
        Graph { library: library.clone(), tensors: Vec::new(), operations: Vec::new() }
    }

    pub(super) fn tensor(
        &mut self,
        place: Place,
        kind: Type,
        dims: [i64; 4],
        strides: [i64; 4],
    ) -> Result<Tensor> {
        let index = self.tensors.len();
        let id = match place {
            Place::Memory(id) | Place::Host(id) => id,
            Place::Virtual => UNNAMED + index as i64,
        };
        let made = Descriptor::new(&self.library, Kind::Tensor)?
            .data_type(A::TensorType, kind)?
            .numbers(A::TensorDims, &dims)?
            .numbers(A::TensorStrides, &strides)?
            .numbers(A::TensorId, &[id])?
            .numbers(A::TensorAlignment, &[ALIGNMENT])?
            .flag(A::TensorVirtual, place == Place::Virtual)?
            .flag(A::TensorByValue, matches!(place, Place::Host(_)))?;
        self.tensors.push(made.finish(Kind::Tensor)?);
        Ok(Tensor { index, dims, strides })
    }

    /// A packed tensor between two operations.
    pub(super) fn between(&mut self, kind: Type, dims: [i64; 4]) -> Result<Tensor> {
        self.tensor(Place::Virtual, kind, dims, packed(dims))
    }

    /// An `f32` of the host.
    pub(super) fn scalar(&mut self, id: i64) -> Result<Tensor> {
        self.tensor(Place::Host(id), Type::F32, [1; 4], [1; 4])
    }

    fn operation(&mut self, kind: Kind, of: Option<(A, &Descriptor)>, tensors: &[(A, Tensor)]) -> Result<()> {
        let mut made = Descriptor::new(&self.library, kind)?;
        if let Some((attribute, what)) = of {
            made = made.part(attribute, what)?;
        }
        for (attribute, tensor) in tensors {
            made = made.part(*attribute, &self.tensors[tensor.index])?;
        }
        self.operations.push(made.finish(kind)?);
        Ok(())
    }

    /// `y = x mode b`, of which modes with one operand have no `b`.
    pub(super) fn pointwise(&mut self, mode: Mode, x: Tensor, b: Option<Tensor>, y: Tensor) -> Result<()> {
        let precision =
            if matches!(mode, Mode::Greater | Mode::GreaterEqual) { Type::Boolean } else { Type::F32 };
        let what = Descriptor::new(&self.library, Kind::Pointwise)?
            .mode(mode)?
            .data_type(A::PointwisePrecision, precision)?;
        let what = what.finish(Kind::Pointwise)?;
        let mut tensors = vec![(A::PointwiseX, x), (A::PointwiseY, y)];
        tensors.extend(b.map(|b| (A::PointwiseB, b)));
        self.operation(Kind::PointwiseOperation, Some((A::PointwiseOf, &what)), &tensors)
    }

    /// `x mode b`, as large as `x`.
    pub(super) fn apply(&mut self, mode: Mode, kind: Type, x: Tensor, b: Option<Tensor>) -> Result<Tensor> {
        let y = self.between(kind, x.dims)?;
        self.pointwise(mode, x, b, y)?;
        Ok(y)
    }

    /// Of each element of `x` its index along an axis.
    pub(super) fn index(&mut self, x: Tensor, axis: i64) -> Result<Tensor> {
        let y = self.between(Type::I32, x.dims)?;
        let what = Descriptor::new(&self.library, Kind::Pointwise)?
            .mode(Mode::Index)?
            .numbers(A::PointwiseAxis, &[axis])?;
        let what = what.data_type(A::PointwisePrecision, Type::F32)?.finish(Kind::Pointwise)?;
        self.operation(
            Kind::PointwiseOperation,
            Some((A::PointwiseOf, &what)),
            &[(A::PointwiseX, x), (A::PointwiseY, y)],
        )?;
        Ok(y)
    }

    /// `x` where `condition` holds, else `other`.
    pub(super) fn select(&mut self, condition: Tensor, x: Tensor, other: Tensor) -> Result<Tensor> {
        let y = self.between(Type::F32, x.dims)?;
        let what = Descriptor::new(&self.library, Kind::Pointwise)?.mode(Mode::Select)?;
        let what = what.data_type(A::PointwisePrecision, Type::F32)?.finish(Kind::Pointwise)?;
        let tensors =
            [(A::PointwiseX, x), (A::PointwiseB, other), (A::PointwiseT, condition), (A::PointwiseY, y)];
        self.operation(Kind::PointwiseOperation, Some((A::PointwiseOf, &what)), &tensors)?;
        Ok(y)
    }

    /// `c = a · b` of the last two dimensions; heads of `b` are shared where it has fewer.
    pub(super) fn multiply(&mut self, a: Tensor, b: Tensor, c: Tensor) -> Result<()> {
        let what = Descriptor::new(&self.library, Kind::Matmul)?.data_type(A::MatmulPrecision, Type::F32)?;
        let what = what.finish(Kind::Matmul)?;
        self.operation(
            Kind::MatmulOperation,
            Some((A::MatmulOf, &what)),
            &[(A::MatmulA, a), (A::MatmulB, b), (A::MatmulC, c)],
        )
    }

    /// Over the dimensions in which `y` is smaller.
    pub(super) fn reduce(&mut self, operator: Reduction, x: Tensor, y: Tensor) -> Result<()> {
        let what = Descriptor::new(&self.library, Kind::Reduction)?.reduction(operator)?;
        let what = what.data_type(A::ReductionPrecision, Type::F32)?.finish(Kind::Reduction)?;
        self.operation(
            Kind::ReductionOperation,
            Some((A::ReductionOf, &what)),
            &[(A::ReductionX, x), (A::ReductionY, y)],
        )
    }

    /// The same elements with their last two dimensions exchanged, as another type.
    pub(super) fn transposed(&mut self, kind: Type, x: Tensor) -> Result<Tensor> {
        let swap = |[b, h, s, d]: [i64; 4]| [b, h, d, s];
        let y = self.tensor(Place::Virtual, kind, swap(x.dims), swap(x.strides))?;
        self.operation(Kind::ReshapeOperation, None, &[(A::ReshapeX, x), (A::ReshapeY, y)])?;
        Ok(y)
    }
}
