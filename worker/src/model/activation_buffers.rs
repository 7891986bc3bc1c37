//! [`BufferSpec`] and [`ActivationBuffers`]: a model declares which buffers it needs for
//! activations and scratch values, and the caller allocates them.
//!
//! A *buffer set* ([`declare_buffer_set`]) is a struct with one field for each buffer. The struct
//! is generic. With [`BufferSpec`] as its parameter, the struct declares the buffers. With
//! references to [`Buf`], the struct gives access to them.
use device::{Buf, Dtype, Ops};

/// The declaration of a buffer for activations or scratch values: its name, length and element
/// type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferSpec {
    /// The name of the field in the buffer set; empty until the set lists its buffers.
    pub name: &'static str,
    /// The number of elements.
    pub len: usize,
    /// Whether the elements are f32 in every precision, as for 1/rms and log-sum-exp.
    is_f32: bool,
}

impl BufferSpec {
    /// Declares a buffer of `len` elements in the data type in which the model computes.
    pub(super) fn in_compute_dtype(len: usize) -> Self {
        BufferSpec { name: "", len, is_f32: false }
    }

    /// Declares a buffer of `len` f32 elements, which stay f32 even if the model computes in bf16
    /// or f16.
    pub(super) fn in_f32(len: usize) -> Self {
        BufferSpec { name: "", len, is_f32: true }
    }

    /// Returns the element type of the buffer: f32 if it was declared as always f32, otherwise the
    /// data type `compute` in which the model computes.
    fn dtype(self, compute: Dtype) -> Dtype {
        if self.is_f32 { Dtype::F32 } else { compute }
    }

    /// Returns the size of the buffer in bytes for a model that computes in the data type
    /// `compute`.
    pub fn count_bytes(self, compute: Dtype) -> usize {
        self.len * self.dtype(compute).size()
    }
}

/// The allocated buffers for a model's activations or scratch values, in the order in which the
/// model declared them.
pub struct ActivationBuffers {
    names: Vec<&'static str>,
    buffers: Vec<Buf>,
}

impl ActivationBuffers {
    /// Allocates one zeroed buffer for each declaration in `specs`; `compute` is the data type in
    /// which the model computes.
    pub fn new(ops: &dyn Ops, specs: &[BufferSpec], compute: Dtype) -> Self {
        let allocate =
            |spec: &BufferSpec| ops.zeroed_with_purpose("activations", spec.dtype(compute), spec.len);
        ActivationBuffers {
            names: specs.iter().map(|spec| spec.name).collect(),
            buffers: specs.iter().map(allocate).collect(),
        }
    }

    /// Returns the buffer with the name `name`, or `None` if the model has not declared such a
    /// buffer.
    pub fn find_buffer(&self, name: &str) -> Option<&Buf> {
        self.names.iter().position(|n| *n == name).map(|i| &self.buffers[i])
    }

    /// Returns the buffers for reading as a struct with one named field per buffer, whose first
    /// field is the buffer that was declared first.
    ///
    /// # Panics
    ///
    /// Panics if there are fewer buffers than fields.
    pub(super) fn borrow_as_struct<'a, S: BufferSet<&'a Buf>>(&'a self) -> S {
        S::from_values(&mut self.buffers.iter())
    }

    /// Returns the buffers for writing as a struct with one named field per buffer, whose first
    /// field is the buffer that was declared first.
    ///
    /// # Panics
    ///
    /// Panics if there are fewer buffers than fields.
    pub(super) fn borrow_as_struct_mut<'a, S: BufferSet<&'a mut Buf>>(&'a mut self) -> S {
        S::from_values(&mut self.buffers.iter_mut())
    }
}

/// Converts a struct with one buffer declaration per field to a list of declarations, in which each
/// buffer gets its field's name.
pub(super) fn list_buffer_specs<S: BufferSet<BufferSpec>>(set: S) -> Vec<BufferSpec> {
    let (mut specs, mut names) = (Vec::new(), Vec::new());
    set.append_fields(&mut specs);
    S::append_names(&mut names);
    specs.iter().zip(names).map(|(spec, name)| BufferSpec { name, ..*spec }).collect()
}

/// A struct with one field of type `T` for each buffer of a model, where `T` is a declaration of a
/// buffer or a reference to one.
pub(super) trait BufferSet<T>: Sized {
    /// Creates the struct from an iterator, which yields the values of the fields in their order.
    ///
    /// # Panics
    ///
    /// Panics if there are fewer values than fields.
    fn from_values(values: &mut impl Iterator<Item = T>) -> Self;

    /// Appends the values of the struct's fields (buffers or buffer declarations) to the list
    /// `values`, in the order of the fields.
    fn append_fields(self, values: &mut Vec<T>);

    /// Appends the names of the struct's fields, which become the names of the model's buffers, to
    /// the list `names`.
    fn append_names(names: &mut Vec<&'static str>);
}

/// Declares a struct, generic over `T`, that has one field of type `T` for each buffer of a model.
/// Also implements [`BufferSet`] for the struct. The field `with name: Set` after the struct
/// contains the buffers of another set.
macro_rules! declare_buffer_set {
    (
        $(#[$set_attribute:meta])*
        $visibility:vis struct $set:ident {
            $($(#[$attribute:meta])* $field:ident,)*
        }
        $($(#[$nested_attribute:meta])* with $nested:ident: $nested_set:ident)?
    ) => {
        $(#[$set_attribute])*
        $visibility struct $set<T> {
            $($(#[$attribute])* $visibility $field: T,)*
            $($(#[$nested_attribute])* $visibility $nested: $nested_set<T>,)?
        }

        impl<T> $crate::model::activation_buffers::BufferSet<T> for $set<T> {
            fn from_values(values: &mut impl Iterator<Item = T>) -> Self {
                $set {
                    $($field: values.next().expect("each field of the set has a value"),)*
                    $($nested: $crate::model::activation_buffers::BufferSet::from_values(values),)?
                }
            }

            fn append_fields(self, values: &mut Vec<T>) {
                values.extend([$(self.$field),*]);
                $($crate::model::activation_buffers::BufferSet::append_fields(self.$nested, values);)?
            }

            fn append_names(names: &mut Vec<&'static str>) {
                names.extend([$(stringify!($field)),*]);
                $(<$nested_set<T> as $crate::model::activation_buffers::BufferSet<T>>::append_names(names);)?
            }
        }
    };
}
pub(super) use declare_buffer_set;

#[cfg(test)]
mod tests {
    use super::*;
    use device::Cpu;

    declare_buffer_set! {
        /// A set of buffers for tests, which another set contains.
        struct InnerBuffers {
            third,
        }
    }

    declare_buffer_set! {
        /// A set of buffers for tests that contains another set.
        struct OuterBuffers {
            first,
            second,
        }
        with inner: InnerBuffers
    }

    #[test]
    fn buffers_have_the_declared_names_lengths_and_types() {
        let specs = list_buffer_specs(OuterBuffers {
            first: BufferSpec::in_compute_dtype(3),
            second: BufferSpec::in_f32(4),
            inner: InnerBuffers { third: BufferSpec::in_compute_dtype(5) },
        });
        assert_eq!(specs.iter().map(|s| s.count_bytes(Dtype::Bf16)).collect::<Vec<_>>(), [6, 16, 10]);
        let mut buffers = ActivationBuffers::new(&Cpu::new(1), &specs, Dtype::Bf16);
        let describe = |buffer: &Buf| (buffer.len(), buffer.dtype());
        for (name, expected) in
            [("first", (3, Dtype::Bf16)), ("second", (4, Dtype::F32)), ("third", (5, Dtype::Bf16))]
        {
            assert_eq!(buffers.find_buffer(name).map(describe), Some(expected), "{name}");
        }
        assert!(buffers.find_buffer("inner").is_none());
        let OuterBuffers { first, second, inner } = buffers.borrow_as_struct();
        assert_eq!([first, second, inner.third].map(Buf::len), [3, 4, 5]);
        let OuterBuffers { second, .. } = buffers.borrow_as_struct_mut();
        second.host_slice_mut()[3] = 1.0;
        assert_eq!(buffers.find_buffer("second").map(|b| b.host_slice()[3]), Some(1.0));
    }
}
