// A fiber's stack, and how one gives way to another: prepare(stack, memory, unused, entry), swap(save, to).
#pragma once
#include <cstddef>
#include <cstring>
#if !defined(__x86_64__) || defined(EMU_PORTABLE)
#include <ucontext.h>
#endif

namespace emu {

constexpr size_t STACK = 256 << 10;  // bytes of a fiber's stack; touched pages only are real

#if defined(__x86_64__) && !defined(EMU_PORTABLE)
using Stack = void*;
extern "C" void dsv4_emu_switch(void** save, void* to);
asm(R"(
    .text
    .local dsv4_emu_switch
    .type dsv4_emu_switch, @function
dsv4_emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmpq *%rcx
    .size dsv4_emu_switch, .-dsv4_emu_switch
)");
// unused: bytes at a stack's end; stacks that end at the same address modulo a page's size would share cache lines.
static void prepare(Stack& stack, char* memory, size_t unused, void (*entry)()) {
    void** top = (void**)(memory + STACK - unused) - 2;
    *top = (void*)entry;  // where the first switch returns to; above it the stack is aligned as at a call
    stack = top - 6;
    memset(stack, 0, 6 * sizeof(void*));
}
static void swap(Stack& save, Stack& to) { dsv4_emu_switch(&save, to); }
#else
using Stack = ucontext_t;
static void prepare(Stack& stack, char* memory, size_t, void (*entry)()) {
    getcontext(&stack);
    stack.uc_stack.ss_sp = memory;
    stack.uc_stack.ss_size = STACK;
    stack.uc_link = nullptr;
    makecontext(&stack, entry, 0);
}
static void swap(Stack& save, Stack& to) { swapcontext(&save, &to); }
#endif

}  // namespace emu
