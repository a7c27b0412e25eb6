//! What a piece of work may take in processor time and memory, and how it is stopped: work charges what it does, and what
//! has charged too much unwinds. The libraries that do the work know nothing of it; their hash tables charge (../ahash).

use std::alloc::{GlobalAlloc, Layout, System};
use std::any::Any;
use std::cell::Cell;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::time::Duration;

/// Between two looks at the clock: a tenth of a millisecond, or some.
const UNITS_A_LOOK: i64 = 4096;

pub struct Limits<'a> {
    pub time: Duration, // of the processor, on this thread
    pub bytes: i64,     // alive at once, of what is made within
    pub stopped: &'a dyn Fn() -> bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Exceeded {
    Time,
    Bytes,
    Stopped,
}

#[derive(Clone, Copy, Default)]
pub struct Spent {
    pub time: Duration, // none when it was too little to look
    pub bytes: i64,
}

struct Section<'a> {
    limits: &'a Limits<'a>,
    from: Cell<Option<Duration>>,
    bytes_before: i64,
    exceeded: Cell<Option<Exceeded>>,
}

thread_local! {
    static LEFT: Cell<i64> = const { Cell::new(i64::MAX) };
    static SECTION: Cell<*const Section<'static>> = const { Cell::new(std::ptr::null()) };
    static ALIVE: Cell<i64> = const { Cell::new(0) };
}

/// The allocator of the whole library: the system's, which knows what each thread has made and not given back.
pub struct Counting;

unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        System.alloc(layout)
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        System.alloc_zeroed(layout)
    }
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        System.dealloc(memory, layout)
    }
    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as i64 - layout.size() as i64);
        System.realloc(memory, layout, size)
    }
}

#[inline]
fn count(bytes: i64) {
    let _ = ALIVE.try_with(|alive| alive.set(alive.get() + bytes));
}

/// Bytes made by this thread and not given back by it.
pub fn alive() -> i64 {
    ALIVE.with(Cell::get)
}

/// Says that work was done. Unwinds when the section that runs has no more left.
#[inline]
pub fn charge(units: usize) {
    let over = LEFT.try_with(|left| {
        let now = left.get().saturating_sub(units as i64);
        left.set(now);
        now < 0
    });
    if over == Ok(true) {
        look();
    }
}

#[cold]
fn look() {
    let section = SECTION.with(Cell::get);
    LEFT.with(|left| left.set(if section.is_null() { i64::MAX } else { UNITS_A_LOOK }));
    if section.is_null() || std::thread::panicking() {
        return;
    }
    // Alive: `within` takes the pointer away before the section ends.
    let section = unsafe { &*section };
    let now = thread_time();
    let from = section.from.get().unwrap_or_else(|| {
        section.from.set(Some(now));
        now
    });
    let exceeded = if (section.limits.stopped)() {
        Exceeded::Stopped
    } else if now - from > section.limits.time {
        Exceeded::Time
    } else if alive() - section.bytes_before > section.limits.bytes {
        Exceeded::Bytes
    } else {
        return;
    };
    section.exceeded.set(Some(exceeded));
    LEFT.with(|left| left.set(i64::MAX)); // what unwinds is not stopped again
    resume_unwind(Box::new("the limit of the work was reached"));
}

fn thread_time() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut now) };
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Whether the section that runs has had all it may, which somebody on its way caught: what is begun now is not stopped again.
pub fn is_spent() -> bool {
    let section = SECTION.with(Cell::get);
    !section.is_null() && unsafe { &*section }.exceeded.get().is_some()
}

/// Runs `work` within `limits`, on this thread; sections do not nest. A panic that is not the meter's goes on; one that is
/// may have been caught on its way, and counts all the same.
pub fn within<R>(limits: &Limits, work: impl FnOnce() -> R) -> (Result<R, Exceeded>, Spent) {
    let section = Section { limits, from: Cell::new(None), bytes_before: alive(), exceeded: Cell::new(None) };
    SECTION.with(|s| s.set((&section as *const Section).cast()));
    LEFT.with(|left| left.set(UNITS_A_LOOK));
    let done: Result<R, Box<dyn Any + Send>> = catch_unwind(AssertUnwindSafe(work));
    SECTION.with(|s| s.set(std::ptr::null()));
    LEFT.with(|left| left.set(i64::MAX));
    let time = section.from.get().map_or(Duration::ZERO, |from| thread_time() - from);
    let spent = Spent { time, bytes: alive() - section.bytes_before };
    match (section.exceeded.get(), done) {
        (Some(exceeded), _) => (Err(exceeded), spent),
        (None, Ok(value)) => (Ok(value), spent),
        (None, Err(panic)) => resume_unwind(panic),
    }
}
