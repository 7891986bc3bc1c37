//! Objects of cuDNN's backend API, such as tensors and operations ([`Descriptor`]). Their
//! attributes are set before they are finalized.
use super::super::bindings::CudnnApi;
use super::super::bindings::cudnn_sys::{
    cudnnBackendAttributeName_t, cudnnBackendAttributeType_t, cudnnBackendDescriptor_t,
    cudnnBackendDescriptorType_t, cudnnBackendHeurMode_t, cudnnDataType_t, cudnnHandle_t,
    cudnnPointwiseMode_t, cudnnReduceTensorOp_t,
};
use super::super::error::Result;
use std::{ffi::c_void, ptr, sync::Arc};

/// Maximum number of engine configurations (ways to compute a graph of operations) that are
/// requested from cuDNN's heuristics.
const MAX_ENGINE_CONFIGS: i64 = 4;

/// A Rust type that can be the value of an attribute of an object of cuDNN's backend API, such as
/// `i64` for dimensions.
///
/// # Safety
///
/// Values must have the memory layout that cuDNN expects for [`AttributeValue::TYPE`].
pub(super) unsafe trait AttributeValue {
    /// The number by which cuDNN identifies the type of attribute values that this Rust type
    /// represents.
    const TYPE: cudnnBackendAttributeType_t;
}

macro_rules! attribute_values {
    ($($value:ty => $type:ident,)*) => {
        $(
            // SAFETY: cuDNN's documentation names this C type for the number.
            unsafe impl AttributeValue for $value {
                const TYPE: cudnnBackendAttributeType_t = cudnnBackendAttributeType_t::$type;
            }
        )*
    };
}

attribute_values! {
    cudnnHandle_t => CUDNN_TYPE_HANDLE,
    cudnnDataType_t => CUDNN_TYPE_DATA_TYPE,
    bool => CUDNN_TYPE_BOOLEAN,
    i64 => CUDNN_TYPE_INT64,
    *const c_void => CUDNN_TYPE_VOID_PTR,
    cudnnBackendHeurMode_t => CUDNN_TYPE_HEUR_MODE,
    cudnnPointwiseMode_t => CUDNN_TYPE_POINTWISE_MODE,
    cudnnBackendDescriptor_t => CUDNN_TYPE_BACKEND_DESCRIPTOR,
    cudnnReduceTensorOp_t => CUDNN_TYPE_REDUCTION_OPERATOR_TYPE,
    u8 => CUDNN_TYPE_CHAR,
}

/// An object of cuDNN's backend API, such as a tensor, an operation or a plan. Dropping it destroys
/// the object.
pub(super) struct Descriptor {
    library: Arc<CudnnApi>,
    kind: cudnnBackendDescriptorType_t,
    handle: cudnnBackendDescriptor_t,
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
    /// Creates a descriptor (an object of cuDNN) of the given kind, without attributes.
    pub(super) fn new(library: &Arc<CudnnApi>, kind: cudnnBackendDescriptorType_t) -> Result<Self> {
        let mut descriptor = Descriptor { library: library.clone(), kind, handle: ptr::null_mut() };
        // SAFETY: writes one handle.
        unsafe { library.cudnnBackendCreateDescriptor(kind, &mut descriptor.handle) }
            .map_err(|error| error.with_failed_function(format!("cudnnBackendCreateDescriptor({kind:?})")))?;
        Ok(descriptor)
    }

    /// Returns cuDNN's handle (pointer) of this descriptor.
    pub(super) fn handle(&self) -> cudnnBackendDescriptor_t {
        self.handle
    }

    /// Sets an attribute of the descriptor to `values`.
    pub(super) fn set_attribute<T: AttributeValue>(
        self,
        attribute: cudnnBackendAttributeName_t,
        values: &[T],
    ) -> Result<Self> {
        let (at, len) = (values.as_ptr().cast::<c_void>(), values.len() as i64);
        // SAFETY: `values` has as many values of that type as its length.
        unsafe { self.library.cudnnBackendSetAttribute(self.handle, attribute, T::TYPE, len, at) }.map_err(
            |error| error.with_failed_function(format!("cudnnBackendSetAttribute({attribute:?})")),
        )?;
        Ok(self)
    }

    /// Finalizes the descriptor: cuDNN checks the attributes, after which they cannot change.
    pub(super) fn finalize(self) -> Result<Self> {
        // SAFETY: the descriptor lives.
        unsafe { self.library.cudnnBackendFinalize(self.handle) }
            .map_err(|error| error.with_failed_function(format!("cudnnBackendFinalize({:?})", self.kind)))?;
        Ok(self)
    }

    /// Reads the values of an attribute of this cuDNN object into `values`, as many as fit, and
    /// returns how many values the attribute has.
    fn query_attribute<T: AttributeValue>(
        &self,
        attribute: cudnnBackendAttributeName_t,
        values: &mut [T],
    ) -> Result<usize> {
        let (at, len, mut count) = (values.as_mut_ptr().cast::<c_void>(), values.len() as i64, 0);
        // SAFETY: writes at most as many values of that type as are requested.
        unsafe {
            self.library.cudnnBackendGetAttribute(self.handle, attribute, T::TYPE, len, &mut count, at)
        }
        .map_err(|error| error.with_failed_function(format!("cudnnBackendGetAttribute({attribute:?})")))?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Reads the value of an integer attribute of this finalized cuDNN descriptor.
    pub(super) fn query_int_attribute(&self, attribute: cudnnBackendAttributeName_t) -> Result<i64> {
        let mut value = [0];
        self.query_attribute(attribute, &mut value)?;
        Ok(value[0])
    }

    /// Returns the engine configurations (ways to compute a graph) that cuDNN's heuristics suggest,
    /// best guess first. This descriptor must be a query of the heuristics.
    pub(super) fn query_engine_configs(&self) -> Result<Vec<Descriptor>> {
        let kind = cudnnBackendDescriptorType_t::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR;
        let mut configs = (0..MAX_ENGINE_CONFIGS)
            .map(|_| Descriptor::new(&self.library, kind))
            .collect::<Result<Vec<_>>>()?;
        // The library fills the descriptors behind the handles.
        let mut handles: Vec<_> = configs.iter().map(Descriptor::handle).collect();
        let attribute = cudnnBackendAttributeName_t::CUDNN_ATTR_ENGINEHEUR_RESULTS;
        configs.truncate(self.query_attribute(attribute, &mut handles)?);
        Ok(configs)
    }
}
