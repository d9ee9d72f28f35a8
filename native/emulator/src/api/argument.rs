//! Arguments as C gives them, turned into values once. The only place that
//! trusts a pointer.

use std::ffi::{CStr, c_char};

use crate::code::Code;

/// A pointer through which a function answers; it may also bring a value.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T: Copy> Out<T> {
    /// Writes the answer.
    pub(crate) fn set(&self, value: T) -> Result<(), Code> {
        self.check()?;
        // SAFETY: not null; the caller passes a pointer to a `T` it owns, as
        // the function's C signature asks.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Reads what the caller put there.
    pub(crate) fn get(&self) -> Result<T, Code> {
        self.check()?;
        // SAFETY: as for `set`; callers initialise what they pass in.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// Refuses a null pointer.
    pub(crate) fn check(&self) -> Result<(), Code> {
        if self.0.is_null() { Err(Code::INVALID_ARGUMENT) } else { Ok(()) }
    }

    /// The same address as another struct of the same versioned family.
    pub(crate) fn cast<U>(&self) -> Out<U> {
        Out(self.0.cast())
    }

    /// Writes an array with the caller's capacity in `count`, and the number
    /// of values into it.
    ///
    /// # Errors
    /// `INSUFFICIENT_SIZE` with the needed count where it is too small.
    pub(crate) fn set_array(&self, count: &Out<u32>, values: &[T]) -> Result<(), Code> {
        let capacity = count.get()?;
        let needed = u32::try_from(values.len()).map_err(|_| Code::UNKNOWN)?;
        count.set(needed)?;
        if capacity < needed {
            return Err(Code::INSUFFICIENT_SIZE);
        }
        if !values.is_empty() {
            self.check()?;
        }
        self.fill(values);
        Ok(())
    }

    /// Writes a list whose room the header takes for granted: `count` is only
    /// answered, and a null array asks for it alone. A caller that does bring
    /// its capacity is protected by it.
    ///
    /// # Errors
    /// `INSUFFICIENT_SIZE` with the needed count.
    pub(crate) fn set_list(&self, count: &Out<u32>, values: &[T]) -> Result<(), Code> {
        let capacity = count.get()?;
        let needed = u32::try_from(values.len()).map_err(|_| Code::UNKNOWN)?;
        count.set(needed)?;
        if self.0.is_null() {
            return Ok(());
        }
        if (1..needed).contains(&capacity) {
            return Err(Code::INSUFFICIENT_SIZE);
        }
        self.fill(values);
        Ok(())
    }

    fn fill(&self, values: &[T]) {
        for (index, value) in values.iter().enumerate() {
            // SAFETY: not null, and the caller has room for all values.
            unsafe { self.0.add(index).write_unaligned(*value) };
        }
    }

    /// Reads one value of an array.
    pub(crate) fn at(&self, index: usize) -> Self {
        // Wrapping arithmetic: the pointer is checked when it is used.
        Self(self.0.wrapping_add(index))
    }
}

/// A pointer through which a function is given a value.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    pub(crate) fn get(&self) -> Result<T, Code> {
        if self.0.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        // SAFETY: not null; the caller passes a `T`, as the C signature asks.
        Ok(unsafe { self.0.read_unaligned() })
    }
}

impl In<c_char> {
    /// A C string of at most so many bytes as a name has.
    pub(crate) fn text(&self) -> Result<String, Code> {
        if self.0.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        // SAFETY: not null; the caller passes a NUL-terminated string.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map(str::to_owned).map_err(|_| Code::INVALID_ARGUMENT)
    }
}

/// A buffer for a text, whose length comes as another argument.
#[repr(transparent)]
pub(crate) struct Text(*mut c_char);

impl Text {
    /// Writes a text with its NUL.
    ///
    /// # Errors
    /// `INSUFFICIENT_SIZE` where it does not fit.
    pub(crate) fn set(&self, length: u32, text: &str) -> Result<(), Code> {
        if self.0.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        if usize::try_from(length).unwrap_or(0) <= text.len() {
            return Err(Code::INSUFFICIENT_SIZE);
        }
        for (index, byte) in text.bytes().chain([0]).enumerate() {
            // SAFETY: not null, and `length` bytes long, of which text and NUL
            // take no more.
            unsafe { self.0.add(index).write(byte.cast_signed()) };
        }
        Ok(())
    }
}

/// A text in a fixed array, cut where it does not fit.
pub(crate) fn text_array<const N: usize>(text: &str) -> [c_char; N] {
    let mut array = [0; N];
    for (place, byte) in array.iter_mut().take(N - 1).zip(text.bytes()) {
        *place = byte.cast_signed();
    }
    array
}

/// Whether a struct's version field is that of a type: `size | number << 24`.
pub(crate) fn check_version<T>(version: u32, number: u32) -> Result<(), Code> {
    let size = u32::try_from(size_of::<T>()).map_err(|_| Code::UNKNOWN)?;
    if version == size | number << 24 { Ok(()) } else { Err(Code::ARGUMENT_VERSION_MISMATCH) }
}
