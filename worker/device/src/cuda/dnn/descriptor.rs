//! Descriptors: everything that cuDNN's graphs are made of is one, with attributes that are set before it is finished.
use super::super::binding::{Dnn as Library, Handle};
use super::super::error::Result;
use super::check;
use std::{
    ffi::{c_int, c_void},
    ptr,
    sync::Arc,
};

/// CUDNN_BACKEND_…_DESCRIPTOR
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Pointwise = 0,
    EngineConfig = 3,
    Heuristics = 4,
    Plan = 5,
    PointwiseOperation = 13,
    Graph = 15,
    VariantPack = 16,
    Tensor = 17,
    Matmul = 18,
    MatmulOperation = 19,
    Reduction = 21,
    ReductionOperation = 22,
    ReshapeOperation = 31,
    Properties = 38,
}

/// CUDNN_ATTR_…
#[derive(Clone, Copy, Debug)]
pub(super) enum Attribute {
    PointwiseMode = 0,
    PointwisePrecision = 1,
    PointwiseAxis = 9,
    HeuristicsMode = 200,
    HeuristicsGraph = 201,
    HeuristicsResults = 202,
    HeuristicsProperties = 204,
    PlanHandle = 400,
    PlanConfig = 401,
    PlanWorkspace = 402,
    PlanProperties = 407,
    PointwiseOf = 750,
    PointwiseX = 751,
    PointwiseB = 752,
    PointwiseY = 753,
    PointwiseT = 758,
    GraphHandle = 800,
    GraphOperations = 801,
    TensorAlignment = 900,
    TensorType = 901,
    TensorDims = 902,
    TensorStrides = 903,
    TensorId = 906,
    TensorVirtual = 907,
    TensorByValue = 908,
    PackIds = 1000,
    PackPointers = 1001,
    PackWorkspace = 1003,
    MatmulPrecision = 1500,
    MatmulA = 1520,
    MatmulB = 1521,
    MatmulC = 1522,
    MatmulOf = 1523,
    ReductionOperator = 1600,
    ReductionPrecision = 1601,
    ReductionX = 1610,
    ReductionY = 1611,
    ReductionOf = 1612,
    ReshapeX = 2200,
    ReshapeY = 2201,
    PropertiesJson = 2702,
}

/// CUDNN_TYPE_…: what an attribute's values are.
const HANDLE: c_int = 0;
const DATA_TYPE: c_int = 1;
const BOOLEAN: c_int = 2;
const INT64: c_int = 3;
const POINTER: c_int = 6;
const HEURISTICS: c_int = 8;
const POINTWISE: c_int = 14;
const DESCRIPTOR: c_int = 15;
const REDUCTION: c_int = 18;
const CHAR: c_int = 24;

/// CUDNN_DATA_…
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Type {
    F32 = 0,
    I32 = 4,
    Bf16 = 9,
    Boolean = 11,
}

/// CUDNN_POINTWISE_…
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Mode {
    Add = 0,
    Mul = 1,
    Div = 6,
    Sub = 9,
    Exp = 13,
    Log = 15,
    Identity = 21,
    Greater = 302,
    GreaterEqual = 303,
    Index = 501,
    /// x where t is true, else b.
    Select = 601,
}

/// CUDNN_REDUCE_TENSOR_…
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Reduction {
    Add = 0,
    Max = 3,
}

/// CUDNN_HEUR_MODE_A
const MODE_A: c_int = 3;
/// Plans that are asked for at most.
const MOST: i64 = 4;

/// One descriptor.
pub(super) struct Descriptor {
    library: Arc<Library>,
    handle: Handle,
}

// SAFETY: descriptors are only read once they are finished.
unsafe impl Send for Descriptor {}
// SAFETY: as above.
unsafe impl Sync for Descriptor {}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made by this library, destroyed once; what refers to it keeps a share of its content.
        let _ = unsafe { (self.library.cudnnBackendDestroyDescriptor)(self.handle) };
    }
}

impl Descriptor {
    pub(super) fn new(library: &Arc<Library>, kind: Kind) -> Result<Self> {
        let mut made = Descriptor { library: library.clone(), handle: ptr::null_mut() };
        // SAFETY: one handle is written.
        let code = unsafe { (library.cudnnBackendCreateDescriptor)(kind as c_int, &mut made.handle) };
        check(library, &format!("cudnnBackendCreateDescriptor({kind:?})"), code)?;
        Ok(made)
    }

    /// The properties of a card that isn't here.
    pub(super) fn properties(library: &Arc<Library>, json: &str) -> Result<Self> {
        Self::new(library, Kind::Properties)?
            .set(Attribute::PropertiesJson, CHAR, json.as_bytes())?
            .finish(Kind::Properties)
    }

    pub(super) fn handle(&self) -> Handle {
        self.handle
    }

    fn set<T>(self, attribute: Attribute, kind: c_int, values: &[T]) -> Result<Self> {
        let at = values.as_ptr().cast::<c_void>();
        // SAFETY: as many values of that type as are said.
        let code = unsafe {
            (self.library.cudnnBackendSetAttribute)(
                self.handle,
                attribute as c_int,
                kind,
                values.len() as i64,
                at,
            )
        };
        check(&self.library, &format!("cudnnBackendSetAttribute({attribute:?})"), code)?;
        Ok(self)
    }

    pub(super) fn numbers(self, attribute: Attribute, values: &[i64]) -> Result<Self> {
        self.set(attribute, INT64, values)
    }

    pub(super) fn flag(self, attribute: Attribute, value: bool) -> Result<Self> {
        self.set(attribute, BOOLEAN, &[value])
    }

    pub(super) fn data_type(self, attribute: Attribute, value: Type) -> Result<Self> {
        self.set(attribute, DATA_TYPE, &[value])
    }

    pub(super) fn mode(self, value: Mode) -> Result<Self> {
        self.set(Attribute::PointwiseMode, POINTWISE, &[value])
    }

    pub(super) fn reduction(self, value: Reduction) -> Result<Self> {
        self.set(Attribute::ReductionOperator, REDUCTION, &[value])
    }

    pub(super) fn best_guesses(self) -> Result<Self> {
        self.set(Attribute::HeuristicsMode, HEURISTICS, &[MODE_A])
    }

    /// The handle of the library.
    pub(super) fn owner(self, attribute: Attribute, handle: Handle) -> Result<Self> {
        self.set(attribute, HANDLE, &[handle])
    }

    pub(super) fn pointers(self, attribute: Attribute, values: &[*const c_void]) -> Result<Self> {
        self.set(attribute, POINTER, values)
    }

    pub(super) fn part(self, attribute: Attribute, of: &Descriptor) -> Result<Self> {
        self.set(attribute, DESCRIPTOR, &[of.handle])
    }

    pub(super) fn parts(self, attribute: Attribute, of: &[Descriptor]) -> Result<Self> {
        let handles: Vec<Handle> = of.iter().map(Descriptor::handle).collect();
        self.set(attribute, DESCRIPTOR, &handles)
    }

    /// Nothing is set any more; what was is checked.
    pub(super) fn finish(self, kind: Kind) -> Result<Self> {
        // SAFETY: the descriptor lives.
        let code = unsafe { (self.library.cudnnBackendFinalize)(self.handle) };
        check(&self.library, &format!("cudnnBackendFinalize({kind:?})"), code)?;
        Ok(self)
    }

    pub(super) fn number(&self, attribute: Attribute) -> Result<i64> {
        let (mut value, mut found) = (0i64, 0i64);
        let at = ptr::from_mut(&mut value).cast();
        // SAFETY: one number is written at most.
        let code = unsafe {
            (self.library.cudnnBackendGetAttribute)(self.handle, attribute as c_int, INT64, 1, &mut found, at)
        };
        check(&self.library, &format!("cudnnBackendGetAttribute({attribute:?})"), code)?;
        Ok(value)
    }

    /// The configurations that heuristics found, best guess first.
    pub(super) fn results(&self) -> Result<Vec<Descriptor>> {
        let mut all = Vec::new();
        for _ in 0..MOST {
            all.push(Descriptor::new(&self.library, Kind::EngineConfig)?);
        }
        let mut handles: Vec<Handle> = all.iter().map(Descriptor::handle).collect();
        let mut found = 0;
        // SAFETY: the library fills the descriptors that the handles are of, at most so many.
        let code = unsafe {
            (self.library.cudnnBackendGetAttribute)(
                self.handle,
                Attribute::HeuristicsResults as c_int,
                DESCRIPTOR,
                MOST,
                &mut found,
                handles.as_mut_ptr().cast(),
            )
        };
        check(&self.library, "cudnnBackendGetAttribute(HeuristicsResults)", code)?;
        all.truncate(usize::try_from(found).unwrap_or(0));
        Ok(all)
    }
}
