//! What crosses the C border: strings, buffers, errors, and the net that catches panics.

use std::cell::RefCell;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Once;

pub const OK: i32 = 0;
pub const CANCELLED: i32 = 1;
pub const INVALID_ARGUMENT: i32 = 3;
pub const RESOURCE_EXHAUSTED: i32 = 8;
pub const FAILED_PRECONDITION: i32 = 9;
pub const UNIMPLEMENTED: i32 = 12;
pub const INTERNAL: i32 = 13;

#[derive(Debug)]
pub struct Error {
    pub code: i32,
    pub message: String,
}

pub type Result<T> = std::result::Result<T, Error>;

pub fn invalid(message: impl Into<String>) -> Error {
    Error { code: INVALID_ARGUMENT, message: message.into() }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Str {
    data: *const u8,
    size: usize,
}

impl Str {
    pub fn of(bytes: &[u8]) -> Str {
        Str { data: bytes.as_ptr(), size: bytes.len() }
    }

    /// # Safety
    /// `data` points to `size` readable bytes, or `size` is 0.
    pub unsafe fn bytes<'a>(self) -> &'a [u8] {
        if self.size == 0 {
            &[]
        } else {
            std::slice::from_raw_parts(self.data, self.size)
        }
    }

    /// # Safety
    /// As `bytes`.
    pub unsafe fn text<'a>(self, what: &str) -> Result<&'a str> {
        std::str::from_utf8(self.bytes())
            .map_err(|e| invalid(format!("{what} is not valid UTF-8: byte {} begins no character", e.valid_up_to())))
    }
}

/// # Safety
/// `data` points to `n` values, or `n` is 0.
pub unsafe fn slice<'a, T>(data: *const T, n: usize) -> &'a [T] {
    if n == 0 {
        &[]
    } else {
        std::slice::from_raw_parts(data, n)
    }
}

#[repr(C)]
pub struct Buf {
    data: *mut u8,
    size: usize,
    capacity: usize,
}

impl Buf {
    pub fn of(bytes: Vec<u8>) -> Buf {
        let mut bytes = std::mem::ManuallyDrop::new(bytes);
        Buf { data: bytes.as_mut_ptr(), size: bytes.len(), capacity: bytes.capacity() }
    }
}

#[no_mangle]
pub extern "C" fn kvt_buf_free(buf: Buf) {
    if !buf.data.is_null() {
        drop(unsafe { Vec::from_raw_parts(buf.data, buf.size, buf.capacity) });
    }
}

thread_local! {
    static PANIC_PLACE: RefCell<String> = const { RefCell::new(String::new()) };
}
static HOOK: Once = Once::new();

/// Runs `f`; an error or a panic becomes its code, its message goes to `error`.
pub fn guard(error: *mut Buf, f: impl FnOnce() -> Result<()>) -> i32 {
    HOOK.call_once(|| {
        // The default hook would write to stderr behind the server's log.
        std::panic::set_hook(Box::new(|info| {
            PANIC_PLACE.with(|place| *place.borrow_mut() = info.to_string());
        }));
    });
    let failure = match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(())) => return OK,
        Ok(Err(e)) => e,
        Err(_) => {
            let place = PANIC_PLACE.with(|place| std::mem::take(&mut *place.borrow_mut()));
            Error { code: INTERNAL, message: format!("the text library failed: {place}") }
        }
    };
    if !error.is_null() {
        unsafe { error.write(Buf::of(failure.message.into_bytes())) };
    }
    failure.code
}

/// Hands a value to C as a pointer that the matching `_free` takes back.
pub fn give<T>(out: *mut *mut T, value: T) {
    unsafe { out.write(Box::into_raw(Box::new(value))) };
}

/// # Safety
/// `pointer` came from `give` and is not used again, or is null.
pub unsafe fn take_back<T>(pointer: *mut T) {
    if !pointer.is_null() {
        // A panic in a destructor must not cross the border either.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(Box::from_raw(pointer))));
    }
}
