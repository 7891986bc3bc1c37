//! [`Descriptor`]: an object of cuDNN's backend API. Its attributes are set before it is finalized.
use super::super::bindings::{CudnnApi, Handle};
use super::super::error::Result;
use super::library::check_status;
use std::{
    ffi::{c_int, c_void},
    ptr,
    sync::Arc,
};

/// Kind of object that a descriptor describes: `CUDNN_BACKEND_…_DESCRIPTOR`.
#[derive(Clone, Copy, Debug)]
pub(super) enum DescriptorType {
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
    DeviceProperties = 38,
}

/// Attribute of a descriptor: `CUDNN_ATTR_…`.
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
    PointwiseDescriptor = 750,
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
    MatmulDescriptor = 1523,
    ReductionOperator = 1600,
    ReductionPrecision = 1601,
    ReductionX = 1610,
    ReductionY = 1611,
    ReductionDescriptor = 1612,
    ReshapeX = 2200,
    ReshapeY = 2201,
    PropertiesJson = 2702,
}

// Types of an attribute's values, with their numbers `CUDNN_TYPE_…`.
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

/// Element type of a tensor: `CUDNN_DATA_…`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum DataType {
    F32 = 0,
    I32 = 4,
    Bf16 = 9,
    Boolean = 11,
}

/// Elementwise operation: `CUDNN_POINTWISE_…`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum PointwiseMode {
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
    /// Selects operand `x` where operand `t` is true, otherwise operand `b`.
    Select = 601,
}

/// Operator of a reduction: `CUDNN_REDUCE_TENSOR_…`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Reduction {
    Add = 0,
    Max = 3,
}

/// The heuristics that cuDNN recommends: `CUDNN_HEUR_MODE_A`.
const HEURISTIC_MODE_A: c_int = 3;
/// Maximum number of engine configurations that are requested from the heuristics for one graph.
const MAX_ENGINE_CONFIGS: i64 = 4;

/// An object of cuDNN's backend API, such as a tensor, an operation or a plan. Dropping it destroys
/// the object.
pub(super) struct Descriptor {
    library: Arc<CudnnApi>,
    handle: Handle,
}

// SAFETY: descriptors are only read after they are finalized.
unsafe impl Send for Descriptor {}
// SAFETY: as for Send.
unsafe impl Sync for Descriptor {}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created by this library, destroyed once. Descriptors that refer to it keep its
        // content.
        let _ = unsafe { (self.library.cudnnBackendDestroyDescriptor)(self.handle) };
    }
}

impl Descriptor {
    /// Creates a descriptor without attributes.
    pub(super) fn new(library: &Arc<CudnnApi>, kind: DescriptorType) -> Result<Self> {
        let mut descriptor = Descriptor { library: library.clone(), handle: ptr::null_mut() };
        // SAFETY: writes one handle.
        let status = unsafe { (library.cudnnBackendCreateDescriptor)(kind as c_int, &mut descriptor.handle) };
        check_status(library, &format!("cudnnBackendCreateDescriptor({kind:?})"), status)?;
        Ok(descriptor)
    }

    /// Creates the descriptor of a GPU, which this machine need not have, from JSON in cuDNN's
    /// form.
    pub(super) fn from_device_properties(library: &Arc<CudnnApi>, json: &str) -> Result<Self> {
        Self::new(library, DescriptorType::DeviceProperties)?
            .set(Attribute::PropertiesJson, CHAR, json.as_bytes())?
            .finalize(DescriptorType::DeviceProperties)
    }

    pub(super) fn handle(&self) -> Handle {
        self.handle
    }

    /// Sets an attribute of the descriptor to `values`. `kind` is the type of the values
    /// (`CUDNN_TYPE_…`).
    fn set<T>(self, attribute: Attribute, kind: c_int, values: &[T]) -> Result<Self> {
        let at = values.as_ptr().cast::<c_void>();
        // SAFETY: `values` has as many values of that type as its length.
        let status = unsafe {
            (self.library.cudnnBackendSetAttribute)(
                self.handle,
                attribute as c_int,
                kind,
                values.len() as i64,
                at,
            )
        };
        check_status(&self.library, &format!("cudnnBackendSetAttribute({attribute:?})"), status)?;
        Ok(self)
    }

    pub(super) fn set_ints(self, attribute: Attribute, values: &[i64]) -> Result<Self> {
        self.set(attribute, INT64, values)
    }

    pub(super) fn set_bool(self, attribute: Attribute, value: bool) -> Result<Self> {
        self.set(attribute, BOOLEAN, &[value])
    }

    pub(super) fn set_data_type(self, attribute: Attribute, value: DataType) -> Result<Self> {
        self.set(attribute, DATA_TYPE, &[value])
    }

    pub(super) fn set_pointwise_mode(self, value: PointwiseMode) -> Result<Self> {
        self.set(Attribute::PointwiseMode, POINTWISE, &[value])
    }

    pub(super) fn set_reduction(self, value: Reduction) -> Result<Self> {
        self.set(Attribute::ReductionOperator, REDUCTION, &[value])
    }

    pub(super) fn set_heuristic_mode_a(self) -> Result<Self> {
        self.set(Attribute::HeuristicsMode, HEURISTICS, &[HEURISTIC_MODE_A])
    }

    /// Sets an attribute of the descriptor to a cuDNN handle.
    pub(super) fn set_handle(self, attribute: Attribute, handle: Handle) -> Result<Self> {
        self.set(attribute, HANDLE, &[handle])
    }

    pub(super) fn set_pointers(self, attribute: Attribute, values: &[*const c_void]) -> Result<Self> {
        self.set(attribute, POINTER, values)
    }

    pub(super) fn set_descriptor(self, attribute: Attribute, value: &Descriptor) -> Result<Self> {
        self.set(attribute, DESCRIPTOR, &[value.handle])
    }

    pub(super) fn set_descriptors(self, attribute: Attribute, values: &[Descriptor]) -> Result<Self> {
        let handles: Vec<Handle> = values.iter().map(Descriptor::handle).collect();
        self.set(attribute, DESCRIPTOR, &handles)
    }

    /// Finalizes the descriptor: cuDNN checks the attributes, after which they cannot change.
    /// `kind` appears in the error message.
    pub(super) fn finalize(self, kind: DescriptorType) -> Result<Self> {
        // SAFETY: the descriptor lives.
        let status = unsafe { (self.library.cudnnBackendFinalize)(self.handle) };
        check_status(&self.library, &format!("cudnnBackendFinalize({kind:?})"), status)?;
        Ok(self)
    }

    /// Reads the value of an integer attribute of the finalized descriptor.
    pub(super) fn query_int(&self, attribute: Attribute) -> Result<i64> {
        let (mut value, mut count) = (0i64, 0i64);
        let at = ptr::from_mut(&mut value).cast();
        // SAFETY: writes at most one integer.
        let status = unsafe {
            (self.library.cudnnBackendGetAttribute)(self.handle, attribute as c_int, INT64, 1, &mut count, at)
        };
        check_status(&self.library, &format!("cudnnBackendGetAttribute({attribute:?})"), status)?;
        Ok(value)
    }

    /// Reads the engine configurations that the heuristics of this descriptor suggest, best guess
    /// first.
    pub(super) fn query_engine_configs(&self) -> Result<Vec<Descriptor>> {
        let mut configs = Vec::new();
        for _ in 0..MAX_ENGINE_CONFIGS {
            configs.push(Descriptor::new(&self.library, DescriptorType::EngineConfig)?);
        }
        let mut handles: Vec<Handle> = configs.iter().map(Descriptor::handle).collect();
        let mut count = 0;
        // SAFETY: the library fills at most MAX_CONFIGS of the descriptors behind the handles.
        let status = unsafe {
            (self.library.cudnnBackendGetAttribute)(
                self.handle,
                Attribute::HeuristicsResults as c_int,
                DESCRIPTOR,
                MAX_ENGINE_CONFIGS,
                &mut count,
                handles.as_mut_ptr().cast(),
            )
        };
        check_status(&self.library, "cudnnBackendGetAttribute(HeuristicsResults)", status)?;
        configs.truncate(usize::try_from(count).unwrap_or(0));
        Ok(configs)
    }
}
